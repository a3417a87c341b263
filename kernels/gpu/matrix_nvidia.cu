// Fragments of mma.sync m16n8k16. Lane = 4 * g + t. Rows of A: g and g + 8; columns of B and of the sums: g, or
// 2 t and 2 t + 1. Rows 0 to 7 are the queries, rows 8 to 15 what rounding cut off from them.

#define TA_SCORES 4
#define TA_ROW_FIRST 1
#define TA_ROW_END 4
#define TA_K_LOADS ((TA_OWN(TA_D) + 31) / 32)   // of a key, 32 elements over the four lanes that share it
#define TA_V_LOADS ((TA_OWN(TA_DV) + 63) / 64)  // of a value, 64 elements over the eight lanes that share it

TA_INLINE int ta_score_row(int lane) { return lane / 4; }
TA_INLINE bool ta_score_owner(int lane) { return lane % 4 == 0; }
TA_INLINE int ta_score_key(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
TA_INLINE int ta_score_lane(int key, int lane) { return lane / 4 * 4 + key % 8 / 2; }
TA_INLINE int ta_score_slot(int key) { return key / 8 * 2 + key % 2; }

#ifndef TA_SHIM
#if TA_K_TYPE == TA_FLOAT16
#define TA_MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define TA_MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
TA_INLINE void ta_mma(float* d, const unsigned* a, unsigned b0, unsigned b1) {
  asm volatile(TA_MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

struct ta_matrix {
  unsigned q[2 * TA_K_LOADS][4];
  ta_v4 k[2][TA_K_LOADS], v[TA_V_LOADS][4];
  float o[TA_V_LOADS][8][4];  // element 8 (2 t + j) + i of load c of row g is the sum of o[c][i][j] and o[c][i][j + 2]

  // Where the wave's `c`-th load of a row begins, for lane 0.
  static TA_INLINE int key_load(int c) { return (TA_PORTION * TA_K_LOADS + c) * 32; }
  static TA_INLINE int value_load(int c) { return (TA_PORTION * TA_V_LOADS + c) * 64; }
  static TA_INLINE int element(int c, int i, int j, int lane) { return value_load(c) + (lane % 4 * 2 + j) * 8 + i; }

  TA_INLINE void start(const ta_call& call, const ta_place& here, int lane) {
#pragma unroll
    for (int c = 0; c < TA_K_LOADS; c++) {
      float x[8];
      ta_load_query(call, here, lane / 4, key_load(c) + lane % 4 * 8, x);
#pragma unroll
      for (int i = 0; i < 4; i++) ta_split(x[2 * i], x[2 * i + 1], &q[2 * c + i / 2][i % 2 * 2], &q[2 * c + i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < TA_V_LOADS * 32; i++) o[i / 32][i / 4 % 8][i % 4] = 0.f;
  }

  TA_INLINE void load_keys(const char* keys, int step, int key, int last, int lane) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const char* row = keys + (long long)ta_min(key + n * 8 + lane / 4, last) * step;
#pragma unroll
      for (int c = 0; c < TA_K_LOADS; c++) k[n][c] = ta_load(row, key_load(c) + lane % 4 * 8, TA_D);
    }
  }

  TA_INLINE void load_values(const char* values, int step, int key, int last, int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const char* row = values + (long long)ta_min(key + ta_score_key(i, lane), last) * step;
#pragma unroll
      for (int c = 0; c < TA_V_LOADS; c++) v[c][i] = ta_load(row, value_load(c) + lane / 4 * 8, TA_DV);
    }
  }

  TA_INLINE void score(float* x) const {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int c = 0; c < TA_K_LOADS; c++) {
        ta_mma(sums, q[2 * c], k[n][c].x, k[n][c].y);
        ta_mma(sums, q[2 * c + 1], k[n][c].z, k[n][c].w);
      }
      x[2 * n] = ta_score(sums[0], sums[2]);
      x[2 * n + 1] = ta_score(sums[1], sums[3]);
    }
  }

  TA_INLINE void rescale(float factor, int) {
#pragma unroll
    for (int i = 0; i < TA_V_LOADS * 32; i++) o[i / 32][i / 4 % 8][i % 4] *= factor;
  }

  TA_INLINE bool clear() {
    bool found = false;
#pragma unroll
    for (int i = 0; i < TA_V_LOADS * 4; i++) {
      const bool here = ta_clear_piece(&v[i / 4][i % 4]);
      found = found || here;
    }
    return found;
  }

  // Scores 0 and 1 are keys 2 t and 2 t + 1, scores 2 and 3 the same of the other eight: an A fragment as they stand.
  TA_INLINE void add(const float* weights, int) {
    unsigned p[4];
    ta_split(weights[0], weights[1], &p[0], &p[1]);
    ta_split(weights[2], weights[3], &p[2], &p[3]);
#pragma unroll
    for (int c = 0; c < TA_V_LOADS; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned a = (&v[c][0].x)[i], b = (&v[c][1].x)[i], d = (&v[c][2].x)[i], e = (&v[c][3].x)[i];
        ta_mma(o[c][2 * i], p, ta_low_halves(a, b), ta_low_halves(d, e));
        ta_mma(o[c][2 * i + 1], p, ta_high_halves(a, b), ta_high_halves(d, e));
      }
    }
  }

  TA_INLINE void add_cleared(const char* row, float weight, int lane) {
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 16; n++) {
      const int c = n / 16, i = n / 2 % 8, j = n % 2, at = element(c, i, j, lane);
      const float x = at < TA_DV ? ta_type<TA_V_TYPE>::one(row + at * 2) : 0.f;
      if (!(fabsf(x) < TA_INF)) o[c][i][j] += weight * x;
    }
  }

  TA_INLINE void leave(float* sm_o, int lane) const {
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 16; n++) {
      const int c = n / 16, i = n / 2 % 8, j = n % 2, at = element(c, i, j, lane);
      if (at < TA_DV) sm_o[lane / 4 * TA_DV + at] = (o[c][i][j] + o[c][i][j + 2]) * (1.f / TA_P_SCALE);
    }
  }
};
