"""Numba's settings: those with which kernels are possible work, the others are one error that names them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llvmlite import binding

from treeattn import errors
from treeattn.kernels import code_folder, target
from treeattn.kernels.numba_settings import check_settings

IMPOSSIBLE = {
    "NUMBA_DISABLE_JIT": ["1", "2", "yes"],
    "NUMBA_NUM_THREADS": ["0", "-3", "many"],
    "NUMBA_CPU_FEATURES": ["avx2", "+avx,,+avx2", "+avx, +avx2", "+", "-sse", "+avx2,-sse2,+fma"],
}
POSSIBLE = {
    "NUMBA_DISABLE_JIT": ["", "0"],
    "NUMBA_NUM_THREADS": ["1", "02"],
    "NUMBA_CPU_FEATURES": ["", "+avx2", "-avx2,+sse4.2", "-sse4.1,-sse3,", "+unknown-to-anyone"],
}
ADD = """
define void @add(ptr %to, ptr %from) {
  %a = load <16 x i32>, ptr %to
  %b = load <16 x i32>, ptr %from
  %sum = add <16 x i32> %a, %b
  store <16 x i32> %sum, ptr %to
  ret void
}
"""

REGISTERS = {"ymm": 8, "zmm": 16}
"""Numbers of 32 bits in each kind."""

listed = st.lists(st.builds(str.__add__, st.sampled_from("+-"), st.sampled_from(target.GENERATIONS[2:])), max_size=5)


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), pairs(IMPOSSIBLE))
def test_an_impossible_setting_is_named(name, value):
    with pytest.raises(errors.InputError) as caught:
        check_settings({name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert str(caught.value).endswith(f", got {value!r}")


@pytest.mark.parametrize(("name", "value"), pairs(POSSIBLE))
def test_a_possible_one_is_not(name, value):
    check_settings({name: value})


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in IMPOSSIBLE.items()])
def test_doctor_and_a_call_say_which_setting_it_is(name, value):
    program = "import treeattn, treeattn.doctor as d, numpy as np; print(d._answer('first call', d._first_call))\n"
    program += "treeattn.attention(*[np.ones((1, 1, 1, 8), np.float32)] * 3)"
    environment = {**os.environ, name: value}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert f'finding="{name}: expected ' in ended.stdout
    assert ended.stderr.splitlines()[-1].startswith(f"treeattn.errors.InputError: {name}: expected ")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the features' names are those of x86-64")
@given(features=listed)
@example(features=["+avx2", "-sse3", "+sse3"])  # what is given back does not bring back what went with it
def test_vectors_have_registers_in_what_llvm_compiles_for(features):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.config, "CPU_FEATURES", ",".join(features))
        lanes = 16 if target.has_feature("avx512f") else 8 if target.has_feature("avx2") else 4
    machine = binding.Target.from_default_triple().create_target_machine(cpu="generic", features=",".join(features))
    registers = re.findall(r"vpaddd.*%([yz]mm)", machine.emit_assembly(binding.parse_assembly(ADD)))
    assert lanes <= max((REGISTERS[each] for each in registers), default=4)


@pytest.mark.parametrize(("name", "zen"), [("znver4", True), ("emeraldrapids", False), ("generic", False)])
def test_kernels_are_made_for_the_processor_that_numba_is_told_of(monkeypatch, name, zen):
    """And kept apart from those for others: what they depend on is in the name of their folder."""
    own = target.target(), code_folder._fingerprint()
    monkeypatch.setattr(target.config, "CPU_NAME", f"{name}-like")
    assert target.is_zen() is zen
    assert target.target() != own[0]
    assert code_folder._fingerprint() != own[1]


@pytest.mark.parametrize("name", ["f16c", "avx2", "avx512f", "avx512bf16", "avx512vbmi"])
def test_this_processor_has_what_llvm_finds_on_it(monkeypatch, name):
    assert target.has_feature(name) == binding.get_host_cpu_features().get(name, False)
    monkeypatch.setattr(target.config, "ENABLE_AVX", 0)
    assert not target.has_feature(name) or name == "f16c"
