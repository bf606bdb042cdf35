"""`qkablate.variants`: the catalogue as records."""

import json

import qkablate as api
from qkablate import config


def test_every_variant_is_described():
    found = {variant.name: variant for variant in api.variants()}
    assert found.keys() == config.variants().keys()
    assert next(iter(found)) == "standard"
    merged = found["merged_w"]
    assert (merged.qk, merged.ov, merged.match) == ("merged", "separate", "exact")
    assert "W" in merged.equation
    assert merged.parameters


def test_the_command_prints_the_same(qkablate):
    rows = json.loads(qkablate("variants", "--json").out)
    records = [vars(variant) for variant in api.variants()]
    assert [{"name": row.pop("variant"), **row} for row in rows] == records
