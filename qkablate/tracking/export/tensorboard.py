"""Event files for TensorBoard, one folder for each run."""

from pathlib import Path

from qkablate.disk import exclusive_folder
from qkablate.tracking.export.run_log import RunLog


def write_events(log: RunLog, into: Path) -> bool:
    """Write a run's event file; return False if it is there already.

    The name of the file ends with the digest of the log, so that a longer log replaces it.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as hparams
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder, mark = into / log.name, ".qkablate-"
    suffix = f"{mark}{log.digest[:12]}"
    earlier = list(folder.glob(f"events.out.tfevents.*{mark}*"))
    if any(path.name.endswith(suffix) for path in earlier):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_folder(into / f".unfinished-{log.name}") as temporary:
        writer = EventFileWriter(str(temporary), filename_suffix=suffix)
        values = {k: x if type(x) in (bool, int, float) else str(x) for k, x in log.config.items()}
        config = hparams.hparams_pb(values, trial_id=log.name, start_time_secs=log.start)
        writer.add_event(Event(wall_time=log.start, step=0, summary=config))
        last = log.rows[-1] if log.rows else None
        points = [(row.step, row.time, row.metrics) for row in log.rows]
        points += [(last.step, last.time, log.final)] if last else []
        for step, time, metrics in points:
            pairs = [Summary.Value(tag=name, simple_value=x) for name, x in metrics.items()]
            writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=pairs)))
        writer.close()
        (file,) = temporary.iterdir()
        file.replace(folder / file.name)
    for path in earlier:
        path.unlink()
    return True
