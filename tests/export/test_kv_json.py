"""SGLang's file of KV scales: what is written, and a check that never takes what SGLang would silently throw away."""

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.sglang_schema import accepted
from quantkit.export.kv_json import (
    check_file,
    check_scales_json,
    file_name,
    rank_heads,
    scales_json,
    sglang_notes,
    write_scales_json,
)
from quantkit.kernels.errors import QuantkitError

LAYERS = 3
SCALES = {0: (0.5, 0.25), 1: (0.0234375, 0.03125), 2: (float(np.float32(0.1)), float(np.float32(0.07)))}


def good(tp: int = 2):
    return scales_json("llama", LAYERS, SCALES, tp)


def reasons(data, tp=2, layers=LAYERS, kind="llama"):
    return check_scales_json(data, tp=tp, num_layers=layers, model_type=kind)


# ---- written ----


def test_the_whole_file():
    assert good() == {
        "model_type": "llama",
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {rank: {"0": 0.5, "1": 0.03125, "2": 0.10000000149011612} for rank in ("0", "1")},
        },
    }


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_what_is_written_is_accepted_on_every_rank(tp, tmp_path):
    path = write_scales_json(tmp_path, good(tp), tp)
    assert path.name == file_name(tp) == f"kv_cache_scales.tp{tp}.json"
    assert check_file(path, tp=tp, num_layers=LAYERS, model_type="llama") == []
    read = json.loads(path.read_text())
    assert accepted(read, tp, LAYERS, "llama")
    for ranks in read["kv_cache"]["scaling_factor"].values():
        for layer, scale in ranks.items():
            assert np.float32(scale) == np.float32(max(SCALES[int(layer)]))
    again = write_scales_json(tmp_path, good(tp), tp)
    assert again.read_bytes() == path.read_bytes()


# 8 KV heads, by hand: which of them each rank holds
HELD = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[0, 1, 2, 3], [4, 5, 6, 7]],
    4: [[0, 1], [2, 3], [4, 5], [6, 7]],
    8: [[0], [1], [2], [3], [4], [5], [6], [7]],
    16: [[0], [0], [1], [1], [2], [2], [3], [3], [4], [4], [5], [5], [6], [6], [7], [7]],
}
K = [0.1, 0.8, 0.2, 0.3, 0.05, 0.05, 0.4, 0.1]
V = [0.3, 0.1, 0.1, 0.7, 0.06, 0.01, 0.1, 0.9]
LARGEST = {
    1: [0.9],
    2: [0.8, 0.9],
    4: [0.8, 0.7, 0.06, 0.9],
    8: [0.3, 0.8, 0.2, 0.7, 0.06, 0.05, 0.4, 0.9],
    16: [0.3, 0.3, 0.8, 0.8, 0.2, 0.2, 0.7, 0.7, 0.06, 0.06, 0.05, 0.05, 0.4, 0.4, 0.9, 0.9],
}


@pytest.mark.parametrize("tp", HELD)
def test_a_rank_has_the_largest_scale_of_its_heads(tp):
    assert [list(rank_heads(8, tp, rank)) for rank in range(tp)] == HELD[tp]
    data = scales_json("llama", 1, {}, tp, per_rank={0: (K, V)})
    assert [data["kv_cache"]["scaling_factor"][str(rank)]["0"] for rank in range(tp)] == LARGEST[tp]


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (2, 3), (8, 6), (6, 4)])
def test_heads_that_no_engine_can_cut(heads, tp):
    with pytest.raises(QuantkitError, match="do not divide"):
        scales_json("llama", 1, {}, tp, per_rank={0: ([1.0] * heads, [1.0] * heads)})


def test_layers_of_multi_token_prediction_are_left_out():
    data = scales_json("glm4", LAYERS, {**SCALES, 3: (9.0, 9.0)}, 1)
    assert list(data["kv_cache"]["scaling_factor"]["0"]) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("scales", "tp", "message"),
    [
        ({0: (1.0, 1.0), 2: (1.0, 1.0)}, 1, "needs every layer"),
        ({}, 1, "needs every layer"),
        (SCALES, 0, "needs every layer"),
        ({**SCALES, 1: (math.nan, 1.0)}, 1, "cannot be written"),
        ({**SCALES, 1: (1.0, math.nan)}, 1, "cannot be written"),
        ({**SCALES, 1: (math.inf, 1.0)}, 1, "cannot be written"),
        ({**SCALES, 1: (0.0, -1.0)}, 1, "cannot be written"),
    ],
)
def test_scales_that_cannot_be_written(scales, tp, message):
    with pytest.raises(QuantkitError, match=message):
        scales_json("llama", LAYERS, scales, tp)


def test_missing_heads_are_refused():
    with pytest.raises(QuantkitError, match="one for each KV head"):
        scales_json("llama", 1, {}, 1, per_rank={0: ([1.0], [1.0, 2.0])})


# ---- checked ----

PUBLISHED = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1.0, "1": 1.0}}}}


def test_the_published_example_is_refused_for_its_missing_model_type():
    assert reasons(PUBLISHED, tp=1, layers=2) == ['model_type: missing, it must be "llama"']
    assert not accepted(PUBLISHED, 1, 2, "llama")
    named = {**PUBLISHED, "model_type": "llama"}
    assert reasons(named, tp=1, layers=2) == []
    assert accepted(named, 1, 2, "llama")


def at(path: str, value):
    """Set (or with `...` delete) the entry at a dotted path."""

    def change(data):
        *parents, last = path.split("/")
        for key in parents:
            data = data[key]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return change


F = "kv_cache/scaling_factor"
ALL = {"0": 1.0, "1": 1.0, "2": 1.0}
TRAPS = [
    ("model_type: missing", at("model_type", ...)),
    ("model_type: null", at("model_type", None)),
    ('model_type: "qwen2"', at("model_type", "qwen2")),
    ("model_type: 7", at("model_type", 7)),
    ("kv_cache: missing", at("kv_cache", ...)),
    ("kv_cache: null", at("kv_cache", None)),
    ("kv_cache: a list", at("kv_cache", [])),
    ("dtype: missing", at("kv_cache/dtype", ...)),
    *[
        (f'dtype: "{name}"', at("kv_cache/dtype", name))
        for name in ("fp8_e4m3", "float8_e4m3fnuz", "float8_e5m2", "e4m3", "")
    ],
    ("dtype: null", at("kv_cache/dtype", None)),
    ("scaling_factor: missing", at(F, ...)),
    ("scaling_factor: a list", at(F, [ALL, ALL])),
    ("scaling_factor: a number", at(F, 1.0)),
    ("ranks 0, must be 0 to 1", at(F + "/1", ...)),
    ("ranks none", at(F, {})),
    ("ranks 0, 1, 2, must be", at(F + "/2", ALL)),
    ("ranks 1, 2, must be", at(F, {"1": ALL, "2": ALL})),
    ("ranks 0, 1, 3, must be", at(F + "/3", ALL)),
    ("'tp0' is no rank", at(F + "/tp0", ALL)),
    ("rank 1: a list", at(F + "/1", [1.0, 1.0, 1.0])),
    ("rank 1: a number", at(F + "/1", 0.5)),
    ("rank 1: null", at(F + "/1", None)),
    ("rank 1: 2 layers", at(F + "/1/2", ...)),
    ("rank 0: 4 layers", at(F + "/0/3", 1.0)),
    ("rank 1: 3 layers", at(F + "/1", {"0": 1.0, "1": 1.0, "3": 1.0})),
    ("rank 0: 'model.layers.0' is no layer", at(F + "/0/model.layers.0", 1.0)),
    ("layer 1: a list", at(F + "/0/1", [0.5, 0.25])),
    ("layer 1: an object", at(F + "/0/1", {"k": 0.5, "v": 0.25})),
    ("layer 1: null", at(F + "/0/1", None)),
    ("layer 1: a text", at(F + "/0/1", "large")),
    ("layer 1: a text", at(F + "/0/1", "")),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "change"), TRAPS, ids=[t[0] for t in TRAPS])
def test_traps_are_named_and_sglang_refuses_them_too(reason, change):
    data = copy.deepcopy(good())
    change(data)
    found = reasons(data)
    assert len(found) >= 1
    assert any(reason in text for text in found), found
    assert not accepted(data, 2, LAYERS, "llama")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.5, "nan", "-1", False, 0])
def test_scales_that_sglang_would_take_and_no_cache_can_use(value):
    data = good()
    data["kv_cache"]["scaling_factor"]["1"]["2"] = value
    assert accepted(data, 2, LAYERS, "llama")
    assert any("rank 1, layer 2" in text and "positive" in text for text in reasons(data))


@pytest.mark.parametrize(
    "change",
    [
        at("extra", 1),
        at("kv_cache/comment", "measured"),
        at(F + "/0/1", "0.0625"),
        at(F + "/0/1", " 5e-2 "),
        at(F + "/0/1", 3),
        at(F + "/0/1", True),
        at(F, {"00": ALL, " 1 ": ALL}),
        at(F, {"0": {"+0": 1.0, "1.0": 1.0, "02": 1.0}, "1": ALL}),
        at(F, {0: {0: 1.0, 1: 1.0, 2: 1.0}, 1: ALL}),
    ],
)
def test_what_pydantic_coerces_is_accepted(change):
    data = good()
    change(data)
    assert accepted(data, 2, LAYERS, "llama")
    assert reasons(data) == []


@pytest.mark.parametrize(
    ("key", "reason"), [(F + "/01", "rank 1 is there twice"), (F + "/1/02", "layer 2 is there twice")]
)
def test_a_key_in_two_spellings_is_refused(key, reason):
    """pydantic lets the last one win."""
    data = good()
    at(key, ALL if "rank" in reason else 1.0)(data)
    assert reasons(data) and all(reason in text for text in reasons(data))


def test_every_reason_is_given():
    data = good()
    for change in (at("model_type", ...), at("kv_cache/dtype", "fp8"), at(F + "/0/1", None), at(F + "/1", ...)):
        change(data)
    assert len(reasons(data)) == 4


@pytest.mark.parametrize("data", [None, [], "{}", 3, True])
def test_files_that_hold_no_object(data):
    assert reasons(data) and "not an object" in reasons(data)[0]
    assert not accepted(data, 2, LAYERS, "llama")


KEYS = st.one_of(
    st.integers(-1, 3).map(str),
    st.text("0123.+ e", max_size=4),
    st.sampled_from(["00", "1.0", " 1", "-0", "x", "٣", "1e0"]),
)
VALUES = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.none(), st.text("0123.+-_ enaif", max_size=5),
    st.lists(st.floats(), max_size=2), st.sampled_from(["0.5", "1e-3", "Infinity", ".5", "5.", "1_0", "0x1", "１"]),
)  # fmt: skip
FILES = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "llama", "llama", None]),
        "kv_cache": st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["float8_e4m3fn", "float8_e4m3fn", "fp8"]),
                "scaling_factor": st.dictionaries(
                    st.one_of(st.just("0"), KEYS),
                    st.one_of(st.just({"0": 1.0, "1": 0.5}), st.dictionaries(KEYS, VALUES, max_size=3)),
                    max_size=2,
                ),
            }
        ),
    }
)


@settings(max_examples=400, deadline=None)
@given(FILES, st.integers(1, 2), st.integers(1, 2))
def test_nothing_that_sglang_refuses_is_accepted(data, tp, layers):
    """And what it accepts is refused only for a scale that is no positive number, or a second value of a key."""
    found = check_scales_json(data, tp=tp, num_layers=layers, model_type="llama")
    if accepted(data, tp, layers, "llama"):
        assert all("must be a positive number" in text for text in found) or any("twice" in text for text in found)
    else:
        assert found


@settings(max_examples=400, deadline=None)
@given(KEYS, VALUES)
def test_one_key_and_one_value_are_taken_as_pydantic_takes_them(key, value):
    data = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {key: value}}}}
    found = check_scales_json(data, tp=1, num_layers=1, model_type="llama")
    assert accepted(data, 1, 1, "llama") == all("must be a positive number" in text for text in found), found


@given(st.text("01.+-_ ", max_size=6))
def test_keys_of_any_form_are_not_taken_where_pydantic_refuses_them(key):
    data = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {key: 1.0}}}}
    if not check_scales_json(data, tp=1, num_layers=1, model_type="llama"):
        assert accepted(data, 1, 1, "llama")


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "cannot be read"), (b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "a list")]
)
def test_broken_files(content, reason, tmp_path):
    path = tmp_path / file_name(1)
    if content is not None:
        path.write_bytes(content)
    (found,) = check_file(path, tp=1, num_layers=1, model_type="llama")
    assert reason in found


# ---- said ----


def test_what_keeps_sglang_from_using_the_file():
    assert any("no load_kv_cache_scales" in n for n in sglang_notes("deepseek_v3", kv_scheme=False))
    assert not any("no load_kv_cache_scales" in n for n in sglang_notes("llama", kv_scheme=False))
    assert any("TypeError" in n for n in sglang_notes("llama", kv_scheme=True))
    assert any("trtllm_mha" in n for n in sglang_notes("qwen3", kv_scheme=False))
