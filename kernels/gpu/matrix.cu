// The tensor-core kernel: 16-bit K and V of one type, eight rows of one KV head, keys sixteen at a time.
//
// A wave streams its keys straight into the fragments of the matrix instruction: no shared memory, no transposing.
// Rows too wide for one wave's registers are cut over TA_SHARE of them: each multiplies its part of K, they add up
// what they have found in shared memory, all in the same order, and each sums its own part of V.
// Sums over the width may run in any order, so a lane may load 16 neighbouring bytes as long as q is laid out alike.
// The instruction has sixteen rows for eight queries. The other eight carry what rounding to 16 bits cut off from q,
// and later from the probabilities, so that the error stays near float32's and costs nothing.
//
// `matrix_nvidia.cu` and `matrix_amd.cu` say what a fragment is. Each brings
//   ta_matrix          fragments of q, K and V and the accumulators
//   TA_SCORES          logits that a lane holds of sixteen keys, all of the query row ta_score_row(lane)
//   ta_score_key       which key the i-th of them belongs to; ta_score_lane and ta_score_slot: where a key's is
//   TA_ROW_FIRST, _END offsets of the lanes that share a row: powers of two from the first up to, not with, the end
// and both read and write only whole 16-byte pieces of K and V.

#include "dialect.cu"
#include "types.cu"
#include "call.cu"
#include "logits.cu"
#include "publish.cu"

#define TA_GROUPS (TA_THREADS / TA_WAVE / TA_SHARE)
#define TA_STEP (TA_GROUPS * 16)
// Elements of K and V that are one wave's, before they are rounded up to whole loads.
#define TA_OWN(width) (((width) + TA_SHARE - 1) / TA_SHARE)
// The wave's number among those that share a row.
#define TA_PORTION ((int)threadIdx.x / TA_WAVE % TA_SHARE)
#define TA_K_STEP ((int)call.k_stride[2])
#define TA_V_STEP ((int)call.v_stride[2])

#if TA_K_TYPE == TA_FLOAT16
// Probabilities are scaled so that small ones stay within float16's range; an exact power of two.
#define TA_P_SCALE 16384.f
#define TA_INFINITE_BITS 0x7c00u
#define TA_PACK(low, high) ta_pack_half(low, high)
#else
#define TA_P_SCALE 1.f
#define TA_INFINITE_BITS 0x7f80u
#define TA_PACK(low, high) ta_pack_bfloat(low, high)
#endif

TA_INLINE float ta_low_value(unsigned pair) { return TA_K_TYPE == TA_FLOAT16 ? ta_half(pair & 0xffffu) : ta_float(pair << 16); }
TA_INLINE float ta_high_value(unsigned pair) {
  return TA_K_TYPE == TA_FLOAT16 ? ta_half(pair >> 16) : ta_float(pair & 0xffff0000u);
}

// What is left of x once `rounded` is taken off; nothing where that is infinite.
TA_INLINE float ta_rest(float x, float rounded) { return fabsf(rounded) < TA_INF ? x - rounded : 0.f; }

// Two numbers in 16 bits, and what that cut off, again in 16 bits.
TA_INLINE void ta_split(float low, float high, unsigned* rounded, unsigned* rest) {
  *rounded = TA_PACK(low, high);
  *rest = TA_PACK(ta_rest(low, ta_low_value(*rounded)), ta_rest(high, ta_high_value(*rounded)));
}

// Both parts of a score. The rest is dropped where an infinite key turned its 0 into NaN: the score itself says it all.
TA_INLINE float ta_score(float rounded, float rest) { return fabsf(rest) < TA_INF ? rounded + rest : rounded; }

// Zero the NaNs and infinities of a pair; give whether there were any.
TA_INLINE bool ta_clear(unsigned* pair) {
  const unsigned low = TA_INFINITE_BITS, high = TA_INFINITE_BITS << 16, bits = *pair;
  if ((bits & low) == low) *pair &= 0xffff0000u;
  if ((bits & high) == high) *pair &= 0xffffu;
  return *pair != bits;
}

TA_INLINE bool ta_clear_piece(ta_v4* piece) {
  const bool x = ta_clear(&piece->x), y = ta_clear(&piece->y), z = ta_clear(&piece->z), w = ta_clear(&piece->w);
  return x || y || z || w;
}

// 16 bytes of a row, or zeros behind its end.
TA_INLINE ta_v4 ta_load(const char* row, int first, int width) {
  ta_piece<TA_K_TYPE, true> piece;
  piece.load(row, first, width, 0);
  return piece.bits;
}

// Eight neighbouring elements of a query row.
TA_INLINE void ta_load_query(const ta_call& call, const ta_place& here, int row, int first, float* x) {
  const char* q = ta_query_row(call, here, row);
#pragma unroll
  for (int e = 0; e < 8; e++) x[e] = first + e < TA_D ? ta_query(q + (first + e) * call.q_stride[3], call.q_type) : 0.f;
}

#ifdef TA_HIP
#include "matrix_amd.cu"
#else
#include "matrix_nvidia.cu"
#endif

#if TA_SHARE > 1
// Add up what the waves that share a row have each found. The room is used in turn, so that one barrier is enough:
// who writes to it again has passed the barrier in between, which all came to after they had read.
TA_INLINE void ta_add_portions(float* sums, int* turn) {
  __shared__ float found[2][TA_THREADS][TA_SCORES];
  const int thread = threadIdx.x, first = thread - TA_PORTION * TA_WAVE;
  float(*mine)[TA_SCORES] = found[*turn];
  *turn ^= 1;
#pragma unroll
  for (int i = 0; i < TA_SCORES; i++) mine[thread][i] = sums[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TA_SCORES; i++) {
    sums[i] = mine[first][i];
#pragma unroll
    for (int w = 1; w < TA_SHARE; w++) sums[i] += mine[first + w * TA_WAVE][i];
  }
}
#endif

// Add what `ta_clear` took out of V, in the rows that see it. Rare, and slow: one key and one element after the other.
TA_INLINE void ta_add_cleared(const ta_call& call, const ta_place& here, ta_matrix& state, const char* v, int key,
                              const float* weights, int lane) {
  for (int i = 0; i < 16; i++) {
    float weight = weights[0];
#pragma unroll
    for (int j = 1; j < TA_SCORES; j++) weight = ta_score_slot(i) == j ? weights[j] : weight;
    weight = TA_SHUFFLE(weight, ta_score_lane(i, lane), TA_WAVE);
    if (weight == -TA_INF) continue;  // hidden from this lane's row
    const char* row = v + (long long)ta_min(key + i, here.end_key - 1) * TA_V_STEP;
    state.add_cleared(row, weight, lane);
  }
}

extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, TA_BLOCKS) treeattn_matrix(const ta_call call) {
  __shared__ ta_f4 shared_o[(TA_SHARED_O(TA_GROUPS) + 3) / 4];
  float* sm_o = shared_o[0].at;
  __shared__ float sm_m[TA_GROUPS * TA_ROWS], sm_l[TA_GROUPS * TA_ROWS];
  const int lane = threadIdx.x % TA_WAVE, group = threadIdx.x / TA_WAVE / TA_SHARE;
  const ta_place here = ta_here(call, TA_STEP);
  const char* k = call.k + here.batch * call.k_stride[0] + here.head * call.k_stride[1];
  const char* v = call.v + here.batch * call.v_stride[0] + here.head * call.v_stride[1];
  const ta_row row = ta_row_of(call, here, ta_score_row(lane));
  float m = -TA_INF, l = 0.f;
#if TA_SHARE > 1
  int turn = 0;
#endif
  ta_matrix state;
  state.start(call, here, lane);

  // Counted in whole steps: a loop that is plainly the same for all threads needs no code for diverged shuffles.
  for (int base = here.first_key; base < here.end_key; base += TA_STEP) {
    const int key = base + group * 16;
    float x[TA_SCORES], weights[TA_SCORES];
    state.load_keys(k, TA_K_STEP, key, here.end_key - 1, lane);
    state.load_values(v, TA_V_STEP, key, here.end_key - 1, lane);
    state.score(x);
#if TA_SHARE > 1
    ta_add_portions(x, &turn);
#endif
    float highest = m;
    bool clean = true;
#pragma unroll
    for (int i = 0; i < TA_SCORES; i++) {
      x[i] = ta_logit(call, here, row, key + ta_score_key(i, lane), x[i]);
      clean = clean && x[i] != -TA_INF;
      highest = fmaxf(highest, x[i]);
    }
#pragma unroll
    for (int offset = TA_ROW_FIRST; offset < TA_ROW_END; offset *= 2) {
      highest = fmaxf(highest, TA_SHUFFLE_XOR(highest, offset, TA_WAVE));
    }
    const float reference = ta_reference(highest), factor = ta_exp2((m - reference) * TA_LOG2E);
    m = highest;
    l *= factor;
#pragma unroll
    for (int i = 0; i < TA_SCORES; i++) {
      weights[i] = ta_exp2((x[i] - reference) * TA_LOG2E);
      l += weights[i];
      weights[i] *= TA_P_SCALE;
    }
    if (!TA_ALL(factor == 1.f)) state.rescale(factor, lane);
    bool cleared = false;
    if (!TA_ALL(clean)) cleared = !TA_ALL(!state.clear());  // 0 times what a hidden key holds could be NaN
    state.add(weights, lane);
    if (cleared) {
#pragma unroll
      for (int i = 0; i < TA_SCORES; i++) weights[i] = x[i] == -TA_INF ? -TA_INF : weights[i];
      ta_add_cleared(call, here, state, v, key, weights, lane);
    }
  }
#pragma unroll
  for (int offset = TA_ROW_FIRST; offset < TA_ROW_END; offset *= 2) l += TA_SHUFFLE_XOR(l, offset, TA_WAVE);
  state.leave(sm_o + group * TA_ROWS * TA_DV, lane);
  if (ta_score_owner(lane) && TA_PORTION == 0) {
    sm_m[group * TA_ROWS + ta_score_row(lane)] = m;
    sm_l[group * TA_ROWS + ta_score_row(lane)] = l;
  }
  ta_publish(call, here, TA_GROUPS, sm_o, sm_m, sm_l);
}
