"""The project's own exp, exp2 and log: accuracy against extended precision, special values, equal bits."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from treeattn.kernels import exponential

pytestmark = pytest.mark.skipif(
    np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps, reason="NumPy has no type wider than float64 here"
)


def over_array(function):
    """Apply a compiled scalar function to an array: numba's own ufuncs would report overflow as a warning."""

    @numba.njit
    def applied(x):
        out = np.empty_like(x)
        for i in range(x.size):
            out[i] = function(x[i])
        return out

    return applied


exp, exp2, exp2_single, log = (
    over_array(getattr(exponential, name)) for name in ("exp", "exp2_double", "exp2_single", "log")
)


def spread(low, high, dtype=np.float64):
    """Numbers all over a range, near 0, and near the rounding borders of the reduction."""
    rng = np.random.default_rng(0)
    borders = np.arange(-30, 30) * np.log(2) / 2
    everywhere = [rng.uniform(low, high, 100_000), rng.uniform(-1, 1, 50_000), rng.uniform(-1e-6, 1e-6, 1000), borders]
    return np.concatenate(everywhere).astype(dtype)


def largest_error(got, x, exact):
    """Largest error in units in the last place of the result."""
    right = exact(x.astype(np.longdouble))
    unit = np.spacing(np.abs(right).astype(got.dtype)).astype(np.longdouble)
    return float(np.max(np.abs(got - right) / unit))


def test_exp_is_within_one_unit_in_the_last_place():
    x = spread(-745, 709)
    assert largest_error(exp(x), x, np.exp) <= 1.01


def test_exp2_is_within_about_one_unit_in_the_last_place():
    x = spread(-1074, 1023)
    assert largest_error(exp2(x), x, np.exp2) <= 1.25
    x = spread(-149, 127, np.float32)
    assert largest_error(exp2_single(x), x, np.exp2) <= 1.25


def test_log_is_within_about_one_unit_in_the_last_place():
    x = np.concatenate([np.exp(spread(-740, 709)), 1 + np.linspace(-1e-3, 1e-3, 1001), [5e-324, 1e-310]])
    assert largest_error(log(x), x, np.log) <= 1.25


@pytest.mark.parametrize("function", [exp, exp2, exp2_single])
def test_exponentials_of_special_values(function):
    dtype = np.float32 if function is exp2_single else np.float64
    got = function(np.array([0, -0.0, -np.inf, -1e30, np.inf, 1e30, np.nan], dtype))
    np.testing.assert_array_equal(got, np.array([1, 1, 0, 0, np.inf, np.inf, np.nan], dtype))


def test_log_of_special_values():
    got = log(np.array([1, 0, -0.0, np.inf, -1, -np.inf, np.nan]))
    np.testing.assert_array_equal(got, [0, -np.inf, -np.inf, np.inf, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("function", [exp2, exp2_single])
def test_powers_of_two_are_exact_down_to_the_smallest(function):
    dtype, lowest = (np.float32, -149) if function is exp2_single else (np.float64, -1074)
    whole = np.arange(lowest, 128)
    np.testing.assert_array_equal(function(whole.astype(dtype)), np.ldexp(dtype(1), whole))


@pytest.mark.parametrize("name", ["exp", "exp2_double", "exp2_single", "log"])
def test_bits_do_not_depend_on_the_caller(name):
    """Vectorised or one at a time, inside code that may be reordered and contracted or not: the same bits."""
    function = getattr(exponential, name)
    dtype = np.float32 if name == "exp2_single" else np.float64
    x = np.random.default_rng(1).uniform(0.01, 80, 1000).astype(dtype)

    @numba.njit(fastmath=True)
    def in_fast_code(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    @numba.njit
    def one(x):
        return function(x)

    out = np.empty_like(x)
    in_fast_code(x, out)
    np.testing.assert_array_equal(out, [one(value) for value in x])
