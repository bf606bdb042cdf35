"""Translation by an encoder-decoder: greedy decoding and beam search, with caches.

Shape suffixes: N sources, S source, K hypotheses of a source, R = N·K rows, C candidates, V
vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from qkablate.attention import SourceCache
from qkablate.attention.kernels.matmul import linear
from qkablate.data.batches import PAD
from qkablate.data.pairs.sentences import TargetTokens
from qkablate.errors import UserError
from qkablate.models.encoder_decoder import EncoderDecoder

# Appends a token to the hypothesis of each row, which continues that of an earlier row, and returns
# the log-probabilities of the next token.
Step = Callable[[Tensor, Tensor], Tensor]

_SOURCES_AT_ONCE = 64


@torch.inference_mode()
def translate(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], tokens: TargetTokens, beam: int = 1
) -> list[list[int]]:
    """Return the target of each source, without start and end: greedy, or by beam search.

    Sources of similar lengths are translated together; of one length, if the model masks no
    padding.
    """
    targets: dict[int, list[int]] = {}
    by_length = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    mixed = model.padding
    for _, group in itertools.groupby(by_length, key=lambda i: 0 if mixed else len(sources[i])):
        while together := [*itertools.islice(group, _SOURCES_AT_ONCE)]:
            tensors = [torch.tensor(sources[i]) for i in together]
            source_NS = pad_sequence(tensors, batch_first=True, padding_value=PAD)
            step, longest = _make_step(model, source_NS, tokens, beam), model.config.context
            outputs = beam_search(step, len(together), tokens, longest=longest, beam=beam)
            targets |= {i: target for i, (_, target) in zip(together, outputs, strict=True)}
    return [targets[i] for i in range(len(sources))]


def _make_step(model: EncoderDecoder, source_NS: Tensor, tokens: TargetTokens, beam: int) -> Step:
    """Encode the sources once, and return the step of their decoder."""
    device, caches = model.output_weight.device, model.make_caches()
    source_NS = source_NS.to(device)
    y_RSD = model.encode(source_NS).repeat_interleave(beam, 0)
    mask_RS = model.source_mask(source_NS.repeat_interleave(beam, 0))

    def step(tokens_R: Tensor, rows_R: Tensor) -> Tensor:
        for cache in caches:
            if beam > 1 and not isinstance(cache, SourceCache):  # the rows of a source share it
                cache.select(rows_R.to(device))
        tokens_R1 = tokens_R[:, None].to(device)
        x_R1D = model.decode(y_RSD, tokens_R1, caches, key_mask_BS=mask_RS)
        logits_RV = linear(x_R1D[:, -1], model.output_weight).double().cpu()
        if not logits_RV.isfinite().all():
            raise UserError("the logits of the model are not finite: the run has diverged")
        return F.log_softmax(logits_RV, dim=-1)

    return step


def beam_search(
    step: Step, count: int, tokens: TargetTokens, *, longest: int, beam: int
) -> list[tuple[float, list[int]]]:
    """Return the best target of each of `count` sources, after its log-probability per token.

    Of the best `beam` continuations, those that end are complete. The search for a target ends when
    it has `beam` complete hypotheses, or at the longest. One hypothesis is greedy decoding.
    """
    done: list[list[tuple[float, list[int]]]] = [[] for _ in range(count)]
    total_NK = torch.full((count, beam), -math.inf, dtype=torch.float64)
    total_NK[:, 0] = 0.0  # all hypotheses are equal at first
    first_N1 = torch.arange(count)[:, None] * beam
    rows_R, token_R = torch.arange(count * beam), torch.full((count * beam,), tokens.start)
    written_RT = torch.empty(count * beam, 0, dtype=torch.int64)
    for length in range(1, longest + 1):
        log_RV = step(token_R, rows_R)
        vocabulary = log_RV.shape[-1]
        total_NC = (total_NK[..., None] + log_RV.view(count, beam, -1)).flatten(1)
        total_NC, flat_NC = total_NC.topk(min(2 * beam, total_NC.shape[1]))
        parent_NC, token_NC = first_N1 + flat_NC // vocabulary, flat_NC % vocabulary
        ends_NC = token_NC == (-1 if tokens.end is None else tokens.end)
        chosen = []
        for n in range(count):
            ends = ends_NC[n].tolist()
            for c in range(beam):
                if ends[c] and len(done[n]) < beam and total_NC[n, c] > -math.inf:
                    text = written_RT[parent_NC[n, c]].tolist()
                    done[n].append((float(total_NC[n, c]) / length, text))
            chosen.append([c for c, is_end in enumerate(ends) if not is_end][:beam])
        if all(len(complete) == beam for complete in done):
            break
        chosen_NK = torch.tensor(chosen)
        total_NK = total_NC.gather(1, chosen_NK)
        rows_R = parent_NC.gather(1, chosen_NK).flatten()
        token_R = token_NC.gather(1, chosen_NK).flatten()
        written_RT = torch.cat([written_RT[rows_R], token_R[:, None]], 1)
    for n, complete in enumerate(done):
        if len(complete) < beam:  # targets that have reached the longest
            rows = range(n * beam, (n + 1) * beam)
            totals = total_NK[n].tolist()
            complete += [
                (total / longest, written_RT[row].tolist())
                for row, total in zip(rows, totals, strict=True)
            ]
    return [max(complete, key=lambda scored: scored[0]) for complete in done]
