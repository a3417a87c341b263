// The vector kernel: any types, any widths, any number of rows, on any card.
//
// A team of TA_TEAM neighbouring lanes owns a row of K and V: each lane loads 16 bytes of it at a time. A team takes
// TA_UNROLL rows at once. Its TA_ROWS * TA_UNROLL dot products are summed over the lanes by folding: at each step a
// lane gives away half of its numbers and keeps the other half, so that in the end every lane holds its own share of
// them, complete. Masks and exponentials are then computed once per number and not once per lane.

#include "dialect.cu"
#include "types.cu"
#include "call.cu"
#include "logits.cu"
#include "publish.cu"

#define TA_TEAMS (TA_THREADS / TA_TEAM)
#define TA_STEP (TA_TEAMS * TA_UNROLL)

// Numbers are ordered by query row, then by key. Where a team has more lanes than numbers, neighbours hold the same.
struct ta_share {
  static constexpr int NUMBERS = TA_ROWS * TA_UNROLL;
  static constexpr int PER_LANE = NUMBERS > TA_TEAM ? NUMBERS / TA_TEAM : 1;
  static constexpr int COPIES = NUMBERS > TA_TEAM ? 1 : TA_TEAM / NUMBERS;
  static constexpr int KEYS = PER_LANE < TA_UNROLL ? PER_LANE : TA_UNROLL;  // of each of its rows, in one lane
  static constexpr int ROWS = PER_LANE / KEYS;
  static constexpr int LANES = TA_UNROLL / KEYS;  // that share a row, copies not counted

  static TA_INLINE int first(int lane) { return lane / COPIES * PER_LANE; }
  static TA_INLINE constexpr int lane(int number) { return number / PER_LANE * COPIES; }
  static TA_INLINE constexpr int slot(int number) { return number % PER_LANE; }
};

template <int COUNT, int OFFSET>
struct ta_fold {
  static TA_INLINE void run(float* x, int lane) {
    constexpr int KEPT = COUNT > 1 ? COUNT / 2 : 1;
    if (COUNT == 1) {
      x[0] += TA_SHUFFLE_XOR(x[0], OFFSET, TA_TEAM);
    } else {
      const bool upper = lane & OFFSET;
#pragma unroll
      for (int i = 0; i < KEPT; i++) {
        const float kept = upper ? x[i + KEPT] : x[i], given = upper ? x[i] : x[i + KEPT];
        x[i] = kept + TA_SHUFFLE_XOR(given, OFFSET, TA_TEAM);
      }
    }
    ta_fold<KEPT, OFFSET / 2>::run(x, lane);
  }
};

template <int COUNT>
struct ta_fold<COUNT, 0> {
  static TA_INLINE void run(float*, int) {}
};

typedef ta_piece<TA_K_TYPE, TA_K_WIDE> ta_k_piece;
typedef ta_piece<TA_V_TYPE, TA_V_WIDE> ta_v_piece;
#define TA_K_EACH ta_k_piece::COUNT
#define TA_V_EACH ta_v_piece::COUNT
#define TA_K_PIECES ((TA_D + TA_TEAM * TA_K_EACH - 1) / (TA_TEAM * TA_K_EACH))
#define TA_V_PIECES ((TA_DV + TA_TEAM * TA_V_EACH - 1) / (TA_TEAM * TA_V_EACH))

// First element of a lane's piece `p`.
TA_INLINE int ta_k_first(int p, int lane) { return (p * TA_TEAM + lane) * TA_K_EACH; }
TA_INLINE int ta_v_first(int p, int lane) { return (p * TA_TEAM + lane) * TA_V_EACH; }

struct ta_vector {
  float q[TA_ROWS][TA_K_PIECES * TA_K_EACH], o[TA_ROWS][TA_V_PIECES * TA_V_EACH];
  float m[ta_share::ROWS], l[ta_share::ROWS];  // of the lane's share only

  TA_INLINE void start(const ta_call& call, const ta_place& here, int lane) {
#pragma unroll
    for (int r = 0; r < TA_ROWS; r++) {
      const char* row = ta_query_row(call, here, r);
#pragma unroll
      for (int i = 0; i < TA_K_PIECES * TA_K_EACH; i++) {
        const int d = ta_k_first(i / TA_K_EACH, lane) + i % TA_K_EACH;
        q[r][i] = d < TA_D ? ta_query(row + d * call.q_stride[3], call.q_type) : 0.f;
      }
#pragma unroll
      for (int i = 0; i < TA_V_PIECES * TA_V_EACH; i++) o[r][i] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < ta_share::ROWS; i++) {
      m[i] = -TA_INF;
      l[i] = 0.f;
    }
  }

  // Dot products of one key with all rows, in this lane's elements.
  TA_INLINE void dots(const ta_k_piece* pieces, float* sums) const {
    float x[TA_K_EACH];
#pragma unroll
    for (int p = 0; p < TA_K_PIECES; p++) {
      pieces[p].get(x);
#pragma unroll
      for (int r = 0; r < TA_ROWS; r++) {
        float sum = p == 0 ? 0.f : sums[r * TA_UNROLL];
#pragma unroll
        for (int e = 0; e < TA_K_EACH; e++) sum = fmaf(q[r][p * TA_K_EACH + e], x[e], sum);
        sums[r * TA_UNROLL] = sum;
      }
    }
  }

  // Replace the lane's logits by probabilities and give each row's factor for what came before.
  TA_INLINE void weigh(float* x, float* factor) {
#pragma unroll
    for (int i = 0; i < ta_share::ROWS; i++) {
      float* mine = x + i * ta_share::KEYS;
      float highest = m[i];
#pragma unroll
      for (int j = 0; j < ta_share::KEYS; j++) highest = fmaxf(highest, mine[j]);
#pragma unroll
      for (int lanes = 1; lanes < ta_share::LANES; lanes *= 2) {
        highest = fmaxf(highest, TA_SHUFFLE_XOR(highest, lanes * ta_share::COPIES, TA_TEAM));
      }
      const float reference = ta_reference(highest);
      factor[i] = ta_exp2((m[i] - reference) * TA_LOG2E);
      m[i] = highest;
      l[i] *= factor[i];
#pragma unroll
      for (int j = 0; j < ta_share::KEYS; j++) {
        mine[j] = ta_exp2((mine[j] - reference) * TA_LOG2E);
        l[i] += mine[j];
      }
    }
  }

  TA_INLINE void rescale(const float* factor) {
#pragma unroll
    for (int r = 0; r < TA_ROWS; r++) {
      const int number = r * TA_UNROLL;
      const float f = TA_SHUFFLE(factor[ta_share::slot(number) / ta_share::KEYS], ta_share::lane(number), TA_TEAM);
#pragma unroll
      for (int i = 0; i < TA_V_PIECES * TA_V_EACH; i++) o[r][i] *= f;
    }
  }

  // Add one value, weighted. Where a key is hidden from some row (a weight of -inf), that row skips it: 0 times what
  // it holds could be NaN.
  template <bool HIDDEN>
  TA_INLINE void add(const ta_v_piece* pieces, const float* weights) {
    float x[TA_V_EACH];
#pragma unroll
    for (int p = 0; p < TA_V_PIECES; p++) {
      pieces[p].get(x);
#pragma unroll
      for (int r = 0; r < TA_ROWS; r++) {
        const float w = weights[r];
#pragma unroll
        for (int e = 0; e < TA_V_EACH; e++) {
          float* sum = &o[r][p * TA_V_EACH + e];
          *sum = HIDDEN && w == -TA_INF ? *sum : fmaf(w, x[e], *sum);
        }
      }
    }
  }

  template <bool HIDDEN>
  TA_INLINE void add_all(ta_v_piece (*pieces)[TA_V_PIECES], const float* shares) {
#pragma unroll
    for (int u = 0; u < TA_UNROLL; u++) {
      float weights[TA_ROWS];
#pragma unroll
      for (int r = 0; r < TA_ROWS; r++) {
        const int number = r * TA_UNROLL + u;
        weights[r] = TA_SHUFFLE(shares[ta_share::slot(number)], ta_share::lane(number), TA_TEAM);
      }
      add<HIDDEN>(pieces[u], weights);
    }
  }

  TA_INLINE void leave(float* sm_o, float* sm_m, float* sm_l, int team, int lane) {
#pragma unroll
    for (int r = 0; r < TA_ROWS; r++) {
#pragma unroll
      for (int i = 0; i < TA_V_PIECES * TA_V_EACH; i++) {
        const int d = ta_v_first(i / TA_V_EACH, lane) + i % TA_V_EACH;
        if (d < TA_DV) sm_o[(team * TA_ROWS + r) * TA_DV + d] = o[r][i];
      }
    }
    const int first = ta_share::first(lane);
#pragma unroll
    for (int i = 0; i < ta_share::ROWS; i++) {
      float total = l[i];
#pragma unroll
      for (int lanes = 1; lanes < ta_share::LANES; lanes *= 2) {
        total += TA_SHUFFLE_XOR(total, lanes * ta_share::COPIES, TA_TEAM);
      }
      if (first % TA_UNROLL == 0 && lane % ta_share::COPIES == 0) {
        sm_m[team * TA_ROWS + first / TA_UNROLL + i] = m[i];
        sm_l[team * TA_ROWS + first / TA_UNROLL + i] = total;
      }
    }
  }
};

extern "C" __global__ void TA_LAUNCH_BOUNDS(TA_THREADS, TA_BLOCKS) treeattn_vector(const ta_call call) {
  __shared__ ta_f4 shared_o[(TA_SHARED_O(TA_TEAMS) + 3) / 4];
  float* sm_o = shared_o[0].at;
  __shared__ float sm_m[TA_TEAMS * TA_ROWS], sm_l[TA_TEAMS * TA_ROWS];
  const int lane = threadIdx.x % TA_TEAM, team = threadIdx.x / TA_TEAM, first = ta_share::first(lane);
  const ta_place here = ta_here(call, TA_STEP);
  const char* k = call.k + here.batch * call.k_stride[0] + here.head * call.k_stride[1];
  const char* v = call.v + here.batch * call.v_stride[0] + here.head * call.v_stride[1];
  const int k_step = (int)call.k_stride[2], v_step = (int)call.v_stride[2];  // one multiplication a row, not four
  ta_row rows[ta_share::ROWS];
  ta_vector state;
  state.start(call, here, lane);
#pragma unroll
  for (int i = 0; i < ta_share::ROWS; i++) rows[i] = ta_row_of(call, here, first / TA_UNROLL + i);

  // Counted in whole steps: a loop that is plainly the same for all threads needs no code for diverged shuffles.
  for (int base = here.first_key; base < here.end_key; base += TA_STEP) {
    const int key = base + team;
    ta_k_piece k_pieces[TA_UNROLL][TA_K_PIECES];
    ta_v_piece v_pieces[TA_UNROLL][TA_V_PIECES];
#pragma unroll
    for (int u = 0; u < TA_UNROLL; u++) {
      const char* row = k + (long long)ta_min(key + u * TA_TEAMS, here.end_key - 1) * k_step;
#pragma unroll
      for (int p = 0; p < TA_K_PIECES; p++) k_pieces[u][p].load(row, ta_k_first(p, lane), TA_D, call.k_stride[3]);
    }
#pragma unroll
    for (int u = 0; u < TA_UNROLL; u++) {
      const char* row = v + (long long)ta_min(key + u * TA_TEAMS, here.end_key - 1) * v_step;
#pragma unroll
      for (int p = 0; p < TA_V_PIECES; p++) v_pieces[u][p].load(row, ta_v_first(p, lane), TA_DV, call.v_stride[3]);
    }
    float x[ta_share::NUMBERS], factor[ta_share::ROWS];
#pragma unroll
    for (int u = 0; u < TA_UNROLL; u++) state.dots(k_pieces[u], x + u);
    ta_fold<ta_share::NUMBERS, TA_TEAM / 2>::run(x, lane);

    bool hidden[ta_share::PER_LANE], clean = true, same = true;
#pragma unroll
    for (int i = 0; i < ta_share::PER_LANE; i++) {
      const int mine = key + (first % TA_UNROLL + i % ta_share::KEYS) * TA_TEAMS;
      x[i] = ta_logit(call, here, rows[i / ta_share::KEYS], mine, x[i]);
      hidden[i] = x[i] == -TA_INF;
      clean = clean && !hidden[i];
    }
    state.weigh(x, factor);
#pragma unroll
    for (int i = 0; i < ta_share::ROWS; i++) same = same && factor[i] == 1.f;
    if (!TA_ALL(same)) state.rescale(factor);  // rare, once the largest logits have been met

#pragma unroll
    for (int i = 0; i < ta_share::PER_LANE; i++) {
#if TA_V_SCALED
      const int mine = ta_min(key + (first % TA_UNROLL + i % ta_share::KEYS) * TA_TEAMS, here.end_key - 1);
      x[i] *= ta_block_scale(call.v_scale, call.v_scale_stride, here, mine / (int)call.v_block);
#endif
      if (hidden[i]) x[i] = -TA_INF;
    }
    if (TA_ALL(clean)) {
      state.add_all<false>(v_pieces, x);
    } else {
      state.add_all<true>(v_pieces, x);
    }
  }
  state.leave(sm_o, sm_m, sm_l, team, lane);
  ta_publish(call, here, TA_TEAMS, sm_o, sm_m, sm_l);
}
