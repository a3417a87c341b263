// From the teams of a block to one state, and from the splits to the packed result, in the same launch.

#include "call.cu"

// Floats of one split's contribution: o of all rows, then m, then l; a multiple of 16 bytes.
#define TA_PART ((TA_ROWS * TA_DV + 2 * TA_ROWS + 3) / 4 * 4)
// Shared floats of a block: o of its teams, and later m and l of all splits.
#define TA_SHARED_O(teams) (TA_ROWS * ((teams) * TA_DV > 2 * TA_MAX_SPLITS ? (teams) * TA_DV : 2 * TA_MAX_SPLITS))
// Neighbouring elements that one thread sums.
#define TA_SUM (TA_DV % 4 == 0 ? 4 : 1)

// Turn `count` maxima m[i * TA_ROWS + row] into weights, and give the merged m and l of the row that the thread has.
TA_INLINE void ta_weigh(float* m, const float* l, int count, float* highest, float* total) {
  __shared__ float tops[TA_ROWS];
  const int thread = threadIdx.x;
  if (thread < TA_ROWS) {
    float top = -TA_INF;
    for (int i = 0; i < count; i++) top = fmaxf(top, m[i * TA_ROWS + thread]);
    tops[thread] = top;
  }
  __syncthreads();
  for (int i = thread; i < count * TA_ROWS; i += TA_THREADS) {
    m[i] = ta_exp2((m[i] - ta_reference(tops[i % TA_ROWS])) * TA_LOG2E);
  }
  __syncthreads();
  if (thread >= TA_ROWS) return;
  *highest = tops[thread];
  *total = 0.f;
  for (int i = 0; i < count; i++) *total += m[i * TA_ROWS + thread] * l[i * TA_ROWS + thread];
}

// Sum TA_SUM elements from `at` on over `count` contributions, `step` floats apart, in their order.
TA_INLINE void ta_sum(const float* o, int step, const float* weights, int count, int at, float* sum) {
  const float* weight = weights + at / TA_DV;
#pragma unroll
  for (int e = 0; e < TA_SUM; e++) sum[e] = 0.f;
#pragma unroll 8
  for (int i = 0; i < count; i++) {
    const float w = weight[i * TA_ROWS];
    float x[TA_SUM];
    if (TA_SUM == 4) {
      const ta_f4 four = *(const ta_f4*)(o + (long long)i * step + at);
#pragma unroll
      for (int e = 0; e < TA_SUM; e++) x[e] = four.at[e];
    } else {
      x[0] = o[(long long)i * step + at];
    }
#pragma unroll
    for (int e = 0; e < TA_SUM; e++) sum[e] += w * x[e];
  }
}

// Write rows of the packed result.
TA_INLINE void ta_write(const ta_call& call, const ta_place& here, const float* o, int step, const float* weights,
                        int count, float highest, float total) {
  const long long rows = call.group * call.q_tokens;
  float* out = call.out + ((here.batch * call.kv_heads + here.head) * rows + here.first_row) * (TA_DV + 2);
  for (int i = threadIdx.x * TA_SUM; i < here.rows * TA_DV; i += TA_THREADS * TA_SUM) {
    float sum[TA_SUM];
    ta_sum(o, step, weights, count, i, sum);
#pragma unroll
    for (int e = 0; e < TA_SUM; e++) out[i / TA_DV * (TA_DV + 2) + i % TA_DV + e] = sum[e];
  }
  if (threadIdx.x < here.rows) {
    out[threadIdx.x * (TA_DV + 2) + TA_DV] = total;
    out[threadIdx.x * (TA_DV + 2) + TA_DV + 1] = highest;
  }
}

// Whether all splits of this tile but this block's have arrived before.
TA_INLINE bool ta_last(const ta_call& call, const ta_place& here) {
  __shared__ bool last;
  __threadfence();  // what this block wrote comes before its arrival
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(call.arrived + here.tile, 1) == (int)call.splits - 1;
    if (last) call.arrived[here.tile] = 0;  // ready for the next launch
  }
  __syncthreads();
  if (last) __threadfence();  // and what the others wrote comes after all of theirs
  return last;
}

// Each of `teams` teams has left o (team, row, width), m and l (team, row) in shared memory. Merge them; where the
// keys are split, the block that arrives last merges the splits, in the order of their keys, whatever order they ran in.
TA_INLINE void ta_publish(const ta_call& call, const ta_place& here, int teams, float* o, float* m, float* l) {
  const int thread = threadIdx.x, splits = (int)call.splits;
  float highest = 0.f, total = 0.f;
  __syncthreads();
  ta_weigh(m, l, teams, &highest, &total);
  if (splits == 1) return ta_write(call, here, o, TA_ROWS * TA_DV, m, teams, highest, total);
  float* parts = call.part + (long long)here.tile * splits * TA_PART;
  float* part = parts + (long long)here.split * TA_PART;
  for (int i = thread * TA_SUM; i < TA_ROWS * TA_DV; i += TA_THREADS * TA_SUM) {
    float sum[TA_SUM];  // registers: in global memory each addition would be a load and a store
    ta_sum(o, TA_ROWS * TA_DV, m, teams, i, sum);
#pragma unroll
    for (int e = 0; e < TA_SUM; e++) part[i + e] = sum[e];
  }
  if (thread < TA_ROWS) {
    part[TA_ROWS * TA_DV + thread] = highest;
    part[TA_ROWS * TA_DV + TA_ROWS + thread] = total;
  }
  if (!ta_last(call, here)) return;
  float *split_m = o, *split_l = o + TA_MAX_SPLITS * TA_ROWS;  // the teams' o is in `part` by now
  for (int i = thread; i < splits * TA_ROWS; i += TA_THREADS) {
    const float* from = parts + (long long)(i / TA_ROWS) * TA_PART + TA_ROWS * TA_DV + i % TA_ROWS;
    split_m[i] = from[0];
    split_l[i] = from[TA_ROWS];
  }
  __syncthreads();
  ta_weigh(split_m, split_l, splits, &highest, &total);
  ta_write(call, here, parts, TA_PART, split_m, splits, highest, total);
}
