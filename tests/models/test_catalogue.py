"""Circuits by name: combinations, errors, files of users, and installed packages."""

import importlib
import sys
import textwrap

import pytest

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.attention.modifiers import NORMS
from qkablate.config import KEYS, Config, ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.config.variant import SITES
from qkablate.errors import UserError
from qkablate.models.catalogue import circuit_classes, load_file, make_attention, resolve_circuits

OWN = """
    from qkablate.attention import QK, apply_matrix, empty_matrix, split_heads

    class Own(QK):
        params = "d²"
        def __init__(self, spec):
            super().__init__(spec)
            self.w_q = empty_matrix(spec.d_model, spec.d_model)
        def queries(self, x_BTD):
            return split_heads(apply_matrix(x_BTD, self.w_q), self.spec.heads)
        def keys(self, y_BSD):
            return split_heads(y_BSD, self.spec.heads)
"""
OWN_OV = """
    from qkablate.attention import OV, split_heads

    class Halved(OV):
        cached = "x"
        def values(self, y_BSD, k_BGSE):
            return split_heads(y_BSD, self.spec.heads) / 2
        def write(self, o_BHTV):
            return o_BHTV.transpose(1, 2).flatten(2)
"""


def with_init(line):
    """Return the circuit with another line at the end of its `__init__`."""
    first, second, rest = OWN.partition("        def queries")
    return f"    import torch\n{first}            {line}\n{second}{rest}"


def test_norms_are_those_of_the_schema():
    assert KEYS["variant.norm"].choices == NORMS


@pytest.fixture
def write_circuit_file(tmp_path):
    def write(text, name="own_qk.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def resolved(**variant):
    config = Config(variant=resolve_variant(VariantConfig(**variant), ModelConfig()))
    return resolve_circuits(config)


def test_every_circuit_has_a_variant():
    entries = variants().values()
    assert {entry["qk"] for entry in entries} == {*QK_CIRCUITS}
    assert {entry["ov"] for entry in entries} == {*OV_CIRCUITS}


@pytest.mark.parametrize("name", variants())
def test_files_are_named_after_their_variants(name):
    model = ModelConfig()
    variant = resolve_variant(VariantConfig(**variants()[name]), model)
    assert variant.name.startswith(name)
    assert make_attention(model, variant).equation


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"qk": "merged", "ov": "no_o"}, "merged+no_o"),
        ({"qk": "shared", "norm": "qk"}, "shared+qk_norm"),
        ({"qk": "shared", "norm": "unit_keys", "mask_self": True}, "shared_qk_reformer"),
        ({"qk": "low_rank"}, "low_rank_w_r16"),
        ({"qk": "low_rank", "rank": 5}, "low_rank_w_r5"),
        ({"qk": "collaborative"}, "collaborative_r32"),
        ({"qk": "grouped", "ov": "grouped"}, "gqa_g2"),
        ({"qk": "grouped", "ov": "grouped", "groups": 1}, "mqa"),
        ({"qk": "grouped", "ov": "tied"}, "grouped+tied_g2"),
        ({"qk": "shared", "ov": "tied", "name": "merged_w"}, "tied_qkv"),
        ({"qk": "shared", "ov": "tied", "name": "my_own"}, "my_own"),
        ({"qk": "low_rank", "name": "low_rank_w_r16"}, "low_rank_w_r16"),
        ({"mask_self": True}, "separate+mask_self"),
        ({"qk": "latent", "ov": "latent"}, "mla_r32"),
        ({"qk": "merged", "rope_dims": 8}, "merged_w_rope8"),
        ({"qk": "low_rank", "rank": 5, "rope_dims": 8}, "low_rank_w_r5_rope8"),
    ],
)
def test_variant_label(given, name):
    assert resolve_variant(VariantConfig(**given), ModelConfig()).name == name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"qk": "merged", "sites": "cross"}, "merged_w_cross"),
        ({"qk": "merged", "sites": "decoder+encoder"}, "merged_w_encoder_decoder"),
        ({"qk": "merged", "sites": "cross+decoder+encoder"}, "merged_w"),
        ({"qk": "merged", "sites": "all"}, "merged_w"),
        ({"qk": "low_rank", "rank": 5, "sites": "cross"}, "low_rank_w_r5_cross"),
        ({"qk": "merged", "ov": "no_o", "sites": "encoder"}, "merged+no_o_encoder"),
        ({"sites": "cross"}, "standard"),
        ({"sites": "encoder", "rope_dims": 4}, "standard_rope4_encoder"),
        ({"sites": "encoder", "init": "symmetric"}, "standard_encoder"),
        ({"sites": "encoder", "init": "naive"}, "standard"),
        ({"mask_self": True, "sites": "decoder"}, "separate+mask_self_decoder"),
        ({"qk": "merged", "name": "mine", "sites": "cross"}, "mine_cross"),
    ],
)
def test_variant_label_shows_its_sites(given, name):
    model = ModelConfig("encoder_decoder")
    variant = resolve_variant(VariantConfig(**given), model)
    assert variant.name == name
    assert resolve_variant(variant, model) == variant


def test_standard_is_the_same_at_any_site():
    """It is one run, the baseline of all sites."""
    model = ModelConfig("encoder_decoder")
    variants_ = [resolve_variant(VariantConfig(sites=s), model) for s in ("all", "cross")]
    assert variants_[0] == variants_[1]


def test_self_mask_is_left_out_of_cross_attention():
    model = ModelConfig("encoder_decoder")
    variant = resolve_variant(VariantConfig(qk="shared", mask_self=True), model)
    masked = [make_attention(model, variant, site).mask_self for site in SITES[model.form]]
    assert masked == [True, True, False]


def test_default_rank_and_groups_differ_from_standard():
    one_head = ModelConfig(heads=1)
    assert resolve_variant(VariantConfig(qk="low_rank"), one_head).rank == 64
    assert resolve_variant(VariantConfig(qk="grouped", ov="grouped"), one_head).groups == 1
    six = ModelConfig(d_model=96, heads=6)
    assert resolve_variant(VariantConfig(qk="grouped", ov="grouped"), six).groups == 3
    assert resolve_variant(VariantConfig(), six).rank is None


def test_file_defines_circuit_and_hash(write_circuit_file):
    path = write_circuit_file(OWN)
    config, hashes = resolved(file=path)
    assert (config.variant.qk, config.variant.name) == ("own_qk", "own_qk")
    qk, ov = circuit_classes(config.variant)
    assert (qk.__name__, ov) == ("Own", OV_CIRCUITS["separate"])
    assert hashes == {"own_qk": load_file(path).sha256}
    make_attention(config.model, config.variant)


def test_file_may_define_an_ov_circuit(write_circuit_file):
    config, _ = resolved(file=write_circuit_file(OWN_OV, "halved.py"), qk="merged")
    assert config.variant.name == "merged+halved"
    assert type(make_attention(config.model, config.variant).ov).__name__ == "Halved"


def test_rank_and_groups_reach_the_circuit_of_a_file(write_circuit_file):
    text = OWN.replace('params = "d²"', 'uses = ("rank",)')
    with pytest.raises(UserError, match=r"variant\.rank: Own needs a number"):
        resolved(file=write_circuit_file(text))
    assert (
        resolved(file=write_circuit_file(text, "own_rank.py"), rank=7)[0].variant.name
        == "own_rank_r7"
    )
    with pytest.raises(UserError, match=r"variant\.rank: qk=own_qk and ov=separate have no rank"):
        resolved(file=write_circuit_file(OWN), rank=7)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def f(:", "bad.py", r"bad\.py' line 1: invalid syntax"),
        ("\nimport nothing_of_the_kind", "bad.py", r"line 2: ModuleNotFoundError"),
        ("x = 1", "bad.py", "defines 0"),
        (OWN + OWN_OV, "bad.py", r"defines 2 \(Own, Halved\)"),
        ("import sys\nsys.exit(7)", "bad.py", "line 2: SystemExit: 7"),
        (
            OWN.replace(
                "self.w_q = empty_matrix(spec.d_model, spec.d_model)", "self.w_q = Linear(8, 8)"
            )
            .replace("apply_matrix(x_BTD, self.w_q)", "self.w_q(x_BTD)")
            .replace("    from", "    from torch.nn import Linear\n    from", 1),
            "bad.py",
            "Own contains torch modules but no `init_` that initializes them",
        ),
        (
            with_init('self.register_buffer("gain", torch.ones(spec.heads))'),
            "bad.py",
            "Own contains buffers but no `init_` that initializes them",
        ),
        (
            with_init('self.register_buffer("gain", torch.ones(spec.heads), persistent=False)'),
            "bad.py",
            r"the values of Own\.gain are lost, as it is neither a parameter nor a persistent buf",
        ),
        (with_init("self.gain = torch.ones(2)"), "bad.py", r"the values of Own\.gain are lost"),
        (
            OWN.replace("d²", "2d²"),
            "bad.py",
            r"params of Own, '2d²', cannot be evaluated \(invalid",
        ),
        (OWN.replace("d²", "2 x"), "bad.py", r"'2 x', cannot be evaluated \(name 'x' is not"),
        ("x = 1\0", "bad.py", "null bytes"),
        (OWN.partition("    def keys")[0], "bad.py", "Own does not define `keys`"),
        (
            OWN.replace("self.spec.heads)", "2 * self.spec.heads)"),
            "bad.py",
            r"its heads and qk\.width=32",
        ),
        (OWN, "merged.py", "must not be the name of a built-in circuit"),
        (OWN, "my-file.py", "letters, digits and _"),
        (OWN.replace("self.w_q = ", "self.w_q = oops"), "bad.py", "line 8: NameError"),
        (
            OWN.replace("split_heads(y_BSD, self.spec.heads)", "y_BSD"),
            "bad.py",
            "`keys` of Own returns shape",
        ),
        (
            OWN.replace("apply_matrix(x_BTD", "apply_matrix(x_BTD[0]"),
            "bad.py",
            "`queries` of Own returns shape",
        ),
    ],
)
def test_errors_in_a_file_are_one_line(write_circuit_file, text, name, says):
    path = write_circuit_file(text, name)

    def use():
        config, _ = resolved(file=path)
        make_attention(config.model, config.variant)

    with pytest.raises(UserError, match=says) as error:
        use()
    assert "\n" not in str(error.value)


def test_file_and_named_circuit_of_one_side_conflict(write_circuit_file):
    with pytest.raises(UserError, match=r"defines the QK circuit, but variant\.qk is 'merged'"):
        resolved(file=write_circuit_file(OWN), qk="merged")


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"variant\.file: cannot read .*: No such file"):
        resolved(file=str(tmp_path / "none.py"))


@pytest.fixture
def installed(write_circuit_file, tmp_path, monkeypatch):
    """Install a package that provides a circuit by an entry point."""
    write_circuit_file(OWN, "some_package_of_circuits.py")
    info = tmp_path / "some_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[qkablate.circuits]\noffered = some_package_of_circuits:Own\n"
        "broken = some_package_of_circuits:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("some_package_of_circuits", None)
    importlib.invalidate_caches()


@pytest.mark.usefixtures("installed")
def test_entry_point_provides_a_circuit():
    config, hashes = resolved(qk="offered")
    assert circuit_classes(config.variant)[0].__name__ == "Own"
    assert len(hashes["offered"]) == 64


@pytest.mark.usefixtures("installed")
def test_both_circuits_may_be_external(write_circuit_file):
    """The hashes of both enter the id of a run."""
    config, hashes = resolved(qk="offered", file=write_circuit_file(OWN_OV, "halved.py"))
    assert config.variant.name == "offered+halved"
    assert [*hashes] == ["halved", "offered"]
    make_attention(config.model, config.variant)


@pytest.mark.usefixtures("installed")
def test_broken_entry_point_is_reported_in_one_line():
    with pytest.raises(UserError, match=r"variant\.qk: 'broken' .* cannot be loaded"):
        resolved(qk="broken")


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"variant\.ov: 'no_w' \(nearest: no_v"):
        circuit_classes(VariantConfig(ov="no_w"))
    with pytest.raises(
        UserError, match=r"'mergd' \(nearest: merged\) .*`qkablate variants` lists all"
    ):
        circuit_classes(VariantConfig(qk="mergd"))
