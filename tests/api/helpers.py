"""Keys of the API from words of the command line."""


def as_keys(words: list[str]) -> dict[str, str]:
    """Return the keys and values of some words; Hydra reads numbers from text, too."""
    import yaml

    return {key: yaml.safe_load(value) for key, value in (w.split("=", 1) for w in words)}
