"""The cost model: what it is read from, and written to."""

import copy
import itertools
import json
from pathlib import Path

import pytest

from treeattn.costs.catalog import LINKS
from treeattn.costs.choosing import choose_radices
from treeattn.costs.model import DEFAULT_MODEL, PRESETS, CostModel, read_model
from treeattn.costs.pricing import cost
from treeattn.errors import InputError
from treeattn.planning.planner import plan_allreduce


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_is_read_by_name_by_file_and_as_it_is(name, tmp_path):
    model = PRESETS[name]
    file = tmp_path / "model.json"
    file.write_text(model.to_json())
    assert model == read_model(name) == read_model(model) == read_model(file) == read_model(str(file))


def test_presets_cap_what_would_be_incast_and_use_the_one_table_of_links():
    assert PRESETS["nvlink-infiniband"].between.largest_radix is None
    assert PRESETS["infinity-fabric-roce"].between.largest_radix == PRESETS["pcie-ethernet"].between.largest_radix == 8
    for model in PRESETS.values():
        assert {model.inside, model.between} <= set(LINKS.values())
    assert PRESETS["default"] is DEFAULT_MODEL


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nvlink", "^model: expected nvlink-infiniband"),
        ("no such file.json", "^model: expected one of default, .*'no such file.json'; there is no such file$"),
        (Path("nowhere"), "^model: expected one of default, .*; there is no such file$"),
        (7, "^model: expected one of default, .*, a CostModel or a file, got 7$"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(model, sentence):
    with pytest.raises(InputError, match=sentence):
        read_model(model)


HOSTILE = [None, "x", -1, 0, 1, 1.5, 10**9, 10**400, float("inf"), float("nan"), True, [], {}, [[]], [[1]], [["x", 2]]]


def test_whatever_stands_in_the_file_of_a_model_it_is_refused_or_chooses_a_plan():
    good = json.loads(PRESETS["infinity-fabric-roce"].to_json())
    good = {**good, "rack": good["between"], "window": good["inside"]}
    ways = [(name,) for name in good]
    ways += [(name, part) for name in ("inside", "rack", "between", "window") for part in good[name]]
    hosts, refused = ["r/a", "r/a", "r/a", "r/b", "s/c", "s/d"], []
    for way, value in itertools.product(ways, HOSTILE):
        within = copy.deepcopy(good)
        (within if len(way) == 1 else within[way[0]])[way[-1]] = value
        try:
            model = CostModel.from_json(json.dumps(within))
        except InputError as error:
            refused.append(str(error))
            continue
        assert CostModel.from_json(model.to_json()).digest == model.digest
        radices = choose_radices(hosts, 1000, shared=True, model=model)
        assert 0 <= cost(plan_allreduce(hosts, radices), 1000, model).total_us < float("inf")
    assert len(refused) > 100
    assert all(each.startswith("model: expected ") for each in refused)
    with pytest.raises(InputError, match=r"^model: expected JSON"):
        CostModel.from_json("[" * 100_000)


def test_what_is_no_name_and_no_text_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    for model in (tmp_path / "binary", str(tmp_path), tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(InputError, match=r"^model: expected "):
            read_model(model)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"inside": 3, "between": 4}', '{"inside": null, "far": 1}'])
def test_what_is_no_file_of_a_model_is_refused_with_a_sentence(text):
    with pytest.raises(InputError, match=r"^model: expected JSON as CostModel.to_json writes it, got "):
        CostModel.from_json(text)
