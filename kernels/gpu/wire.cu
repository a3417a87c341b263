// States on the wire, where GPU memory is what MPI sends: o and l relative to 2**e, then e, in the place of m.
//
// The same operations in the same order as `wire_rows.py`, and so the same bits. One block works on one row.

#include "exponential.cu"
#include "merge.cu"

// exp(m) = s * 2**e, e a whole number that a float holds, 1/2 < s <= 1.
TA_INLINE float ta_exponent(float of_float, float* scale) {
  const double m = of_float, high = ta_double(ta_bits(m) & TA_UPPER_HALF), low = m - high;
  const double most = high * TA_LOG2E_HIGH;
  const double rest = (high * TA_LOG2E_MIDDLE + low * TA_LOG2E_HIGH) + (low * TA_LOG2E_MIDDLE + m * TA_LOG2E_LOW);
  const float e = (float)ceil(most + rest);
  double off = (most - (double)e) + rest;
  off = off > TA_FARTHEST ? TA_FARTHEST : off;
  off = off < -TA_FARTHEST ? -TA_FARTHEST : off;
  const bool finite = m - m == 0.0;
  *scale = (float)ta_exp2_double(finite ? off : 0.0);
  return finite ? e : of_float;
}

// 2**e = s * exp(m), m as near as a float can.
TA_INLINE float ta_reference_of(double e, float* scale) {
  const double m = (double)(float)(e * TA_LN2);
  double off = (e * TA_LN2_HIGH - m) + e * TA_LN2_LOW;
  off = off > 1.0 ? 1.0 : off;
  off = off < -1.0 ? -1.0 : off;
  const bool finite = e - e == 0.0;
  *scale = (float)ta_exp(finite ? off : 0.0);
  return (float)(finite ? m : e);
}

// 2**n for a whole n of at most 0; 0 below the normal range.
TA_INLINE double ta_weight(double n) {
  if (n != n) return n;
  return ta_power(ta_bits((n > -1023.0 ? n : -1023.0) + TA_ROUNDER) - ta_bits(TA_ROUNDER));
}

// Write each source's weight, and give the row's e: the largest, NaN if one is.
TA_INLINE double ta_weigh_rows(const ta_merge& call, long long offset, double* weights) {
  double highest = -TA_INF;
  for (int i = 0; i < (int)call.count; i++) {
    const double e = call.sources[i][offset + call.width - 1];
    if (e > highest || e != e) highest = e;
  }
  for (int i = threadIdx.x; i < (int)call.count; i += TA_THREADS) {
    const double e = call.sources[i][offset + call.width - 1];
    weights[i] = ta_weight(e == highest ? 0.0 : e - highest);
  }
  __syncthreads();  // `out` may be a source: all of e has been read before any of it is written
  return highest;
}

TA_INLINE float ta_sum_o(const ta_merge& call, long long at, const double* weights) {
  float sum = (float)weights[0] * call.sources[0][at];
  for (int i = 1; i < (int)call.count; i++) sum += (float)weights[i] * call.sources[i][at];
  return sum;
}

TA_INLINE float ta_sum_l(const ta_merge& call, long long at, const double* weights) {
  double sum = 0.0;
  for (int i = 0; i < (int)call.count; i++) sum += weights[i] * (double)call.sources[i][at];
  return (float)sum;
}

// From a state, the one source, to wire rows.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_pack(const ta_merge call) {
  const long long offset = blockIdx.x * call.width;
  const int width = (int)call.width;
  const float* state = call.sources[0] + offset;
  float* out = call.out + offset;
  float scale;
  const float e = ta_exponent(state[width - 1], &scale);
  const bool empty = state[width - 2] == 0.f;
  for (int j = threadIdx.x; j < width - 1; j += TA_THREADS) out[j] = empty ? 0.f : scale * state[j];
  if (threadIdx.x == 0) out[width - 1] = empty ? -TA_INF : e;
}

// From wire rows to wire rows.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_merge_rows(const ta_merge call) {
  __shared__ double weights[TA_SOURCES];
  const long long offset = blockIdx.x * call.width, l = offset + call.width - 2;
  const double e = ta_weigh_rows(call, offset, weights);
  for (int j = threadIdx.x; j < (int)call.width - 2; j += TA_THREADS) {
    call.out[offset + j] = ta_sum_o(call, offset + j, weights);
  }
  if (threadIdx.x == 0) {
    call.out[l] = ta_sum_l(call, l, weights);
    call.out[l + 1] = (float)e;
  }
}

// From wire rows to a state, which is none of them: the merge and the unpacking in one launch.
extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, 1) treeattn_unpack(const ta_merge call) {
  __shared__ double weights[TA_SOURCES];
  const long long offset = blockIdx.x * call.width;
  const int width = (int)call.width;
  const double e = ta_weigh_rows(call, offset, weights);
  float scale;
  const float m = ta_reference_of(e + 0.0, &scale);  // so that -0 becomes 0, as on the CPU
  const float l = ta_sum_l(call, offset + width - 2, weights);
  const bool empty = l == 0.f;
  for (int j = threadIdx.x; j < width - 2; j += TA_THREADS) {
    call.out[offset + j] = empty ? 0.f : scale * ta_sum_o(call, offset + j, weights);
  }
  if (threadIdx.x == 0) {
    call.out[offset + width - 2] = empty ? 0.f : scale * l;
    call.out[offset + width - 1] = empty ? -TA_INF : m;
  }
}
