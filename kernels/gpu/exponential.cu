// exp and log as `exponential.py` has them, operation by operation; constants come from there. Compiled without
// contraction.

#include "dialect.cu"

#ifdef TA_HIP
#pragma clang fp contract(off)
#endif

TA_INLINE double ta_double(long long bits) {
  union {
    long long i;
    double d;
  } both;
  both.i = bits;
  return both.d;
}

TA_INLINE long long ta_bits(double x) {
  union {
    long long i;
    double d;
  } both;
  both.d = x;
  return both.i;
}

// 2**n, exact.
TA_INLINE double ta_power(long long n) { return ta_double((n + 1023) << 52); }

TA_INLINE double ta_exp_of_small(double r) {
  const double terms[] = {TA_EXP_TERMS};
  const double z = r * r;
  double odd = terms[0], even = terms[1];
#pragma unroll
  for (int k = 2; k < (int)(sizeof(terms) / sizeof(double)); k += 2) {
    odd = odd * z + terms[k];
    even = even * z + terms[k + 1];
  }
  return 1.0 + (r + z * (even + odd * r));
}

TA_INLINE double ta_exp(double x) {
  x = x < -746.0 ? -746.0 : x;
  x = x > 710.0 ? 710.0 : x;
  const double shifted = x * TA_LOG2E_DOUBLE + TA_ROUNDER;
  const double whole = shifted - TA_ROUNDER;
  const double r = (x - whole * TA_LN2_HIGH) - whole * TA_LN2_LOW;
  const long long n = ta_bits(shifted) - ta_bits(TA_ROUNDER), half = n >> 1;
  return ta_exp_of_small(r) * ta_power(half) * ta_power(n - half);
}

TA_INLINE double ta_exp2_double(double x) {
  x = x < -1076.0 ? -1076.0 : x;
  x = x > 1024.0 ? 1024.0 : x;
  const double shifted = x + TA_ROUNDER, f = x - (shifted - TA_ROUNDER);
  const long long n = ta_bits(shifted) - ta_bits(TA_ROUNDER), half = n >> 1;
  return ta_exp_of_small(f * TA_LN2) * ta_power(half) * ta_power(n - half);
}

TA_INLINE double ta_log_of_near_one(double f) {
  const double terms[] = {TA_LOG_TERMS};
  const double s = f / (2.0 + f), z = s * s;
  double p = terms[0];
#pragma unroll
  for (int k = 1; k < (int)(sizeof(terms) / sizeof(double)); k++) p = p * z + terms[k];
  return f - s * (f - p * z);
}

TA_INLINE double ta_log(double x) {
  const double infinity = ta_double(0x7ffLL << 52);
  if (x <= 0.0) return x == 0.0 ? -infinity : ta_double(0x7ff8LL << 48);
  if (!(x < infinity)) return x;
  long long shift = 0;
  if (x < TA_SMALLEST_NORMAL) {
    x *= 18014398509481984.0;
    shift = -54;
  }
  const long long bits = ta_bits(x), n = (bits - TA_SQRT_HALF_BITS) >> 52;
  const double f = ta_double(bits - (n << 52)) - 1.0, exponent = (double)(n + shift);
  return exponent * TA_LN2_HIGH + (ta_log_of_near_one(f) + exponent * TA_LN2_LOW);
}
