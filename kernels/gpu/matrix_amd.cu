// Fragments of AMD's 16 x 16 x 16 instructions, all three with q as the columns: sums of keys by queries, then of
// V's elements by queries, so that the probabilities leave one instruction as the next one wants them.
//
//   TA_MFMA     CDNA, wave64. Lane = 16 * part + n; a lane holds 4 of 16 terms, and 4 of 16 sums: rows 4 part + i.
//   TA_WMMA 12  RDNA4, wave32. 8 of 16 terms and sums: rows 8 part + i.
//   TA_WMMA 11  RDNA3, wave32. All 16 terms in both halves of the wave, but half of the sums: rows 2 i + part.
//
// Columns n = 0 to 7 are the queries, columns 8 to 15 what rounding cut off from them.

#ifdef TA_MFMA
#define TA_PARTS 4
#define TA_TERMS 4
#define TA_SCORES 4
#else
#define TA_PARTS (TA_WMMA == 12 ? 2 : 1)
#define TA_TERMS (TA_WMMA == 12 ? 8 : 16)
#define TA_SCORES 8
#endif
#define TA_ROW_FIRST 16
#define TA_ROW_END TA_WAVE
// 16-byte loads of a key, whose eight elements each go to one lane of each part; a whole number of instructions.
#define TA_K_LOADS ((TA_OWN(TA_D) + 8 * TA_PARTS - 1) / (8 * TA_PARTS))
#define TA_K_PADDED (TA_TERMS == 16 ? (TA_K_LOADS + 1) / 2 * 2 : TA_K_LOADS)
#define TA_V_LOADS ((TA_OWN(TA_DV) + 127) / 128)  // of a value, 128 elements over the sixteen lanes of a part

TA_INLINE int ta_score_row(int lane) { return lane % 8; }
TA_INLINE bool ta_score_owner(int lane) { return lane < 8; }
// The row of the sums that a lane's i-th is of. As rows of the scores are keys, this is also the i-th score's key.
TA_INLINE int ta_sum_row(int i, int lane) {
  return TA_TERMS == 16 ? 2 * i + lane / 16 : lane / 16 * TA_SCORES + i;
}
TA_INLINE int ta_score_key(int i, int lane) { return ta_sum_row(i, lane); }
TA_INLINE int ta_score_lane(int key, int lane) {
  return lane % 16 + 16 * (TA_TERMS == 16 ? key % 2 : key / TA_SCORES);
}
TA_INLINE int ta_score_slot(int key) { return TA_TERMS == 16 ? key / 2 : key % TA_SCORES; }
// The key of a lane's i-th term of V: the same, but that RDNA3 wants the other half's keys behind its own.
TA_INLINE int ta_term_key(int i, int lane) {
  return TA_TERMS == 16 ? i % 8 * 2 + i / 8 : ta_score_key(i, lane);
}

#ifndef TA_SHIM
typedef float ta_sums __attribute__((ext_vector_type(TA_SCORES)));
#ifdef TA_MFMA
typedef short ta_bfloats __attribute__((ext_vector_type(4)));
typedef _Float16 ta_halves __attribute__((ext_vector_type(4)));
#if TA_K_TYPE == TA_FLOAT16
#define TA_MULTIPLY(a, b, c) \
  __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(ta_halves, a), __builtin_bit_cast(ta_halves, b), c, 0, 0, 0)
#else
#define TA_MULTIPLY(a, b, c) \
  __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(ta_bfloats, a), __builtin_bit_cast(ta_bfloats, b), c, 0, 0, 0)
#endif
#else
typedef short ta_bfloats __attribute__((ext_vector_type(TA_TERMS)));
typedef _Float16 ta_halves __attribute__((ext_vector_type(TA_TERMS)));
#if TA_WMMA == 12
#define TA_WMMA_NAME(type) __builtin_amdgcn_wmma_f32_16x16x16_##type##_w32_gfx12
#else
#define TA_WMMA_NAME(type) __builtin_amdgcn_wmma_f32_16x16x16_##type##_w32
#endif
#if TA_K_TYPE == TA_FLOAT16
#define TA_MULTIPLY(a, b, c) TA_WMMA_NAME(f16)(__builtin_bit_cast(ta_halves, a), __builtin_bit_cast(ta_halves, b), c)
#else
#define TA_MULTIPLY(a, b, c) TA_WMMA_NAME(bf16)(__builtin_bit_cast(ta_bfloats, a), __builtin_bit_cast(ta_bfloats, b), c)
#endif
#endif

struct ta_terms {
  unsigned words[TA_TERMS / 2];
};

TA_INLINE void ta_multiply(float* sums, const ta_terms& a, const ta_terms& b) {
  ta_sums c;
#pragma unroll
  for (int i = 0; i < TA_SCORES; i++) c[i] = sums[i];
  c = TA_MULTIPLY(a, b, c);
#pragma unroll
  for (int i = 0; i < TA_SCORES; i++) sums[i] = c[i];
}
#else
struct ta_terms {
  unsigned words[TA_TERMS / 2];
};
#endif

// The `i`-th group of terms in pieces that lie side by side.
TA_INLINE ta_terms ta_terms_of(const ta_v4* pieces, int i) {
  ta_terms found;
#pragma unroll
  for (int w = 0; w < TA_TERMS / 2; w++) {
    const int word = i * (TA_TERMS / 2) + w;
    found.words[w] = (&pieces[word / 4].x)[word % 4];
  }
  return found;
}

struct ta_matrix {
  ta_v4 q[TA_K_PADDED], k[TA_K_PADDED], v[TA_V_LOADS][TA_TERMS];
  float o[TA_V_LOADS][8][TA_SCORES];  // element 8 ta_sum_row(i) + e of load c of column n is o[c][e][i]

  static TA_INLINE int value_load(int c) { return (TA_PORTION * TA_V_LOADS + c) * 128; }
  static TA_INLINE int element(int c, int e, int i, int lane) { return value_load(c) + ta_sum_row(i, lane) * 8 + e; }
  static TA_INLINE int first(int c, int lane) {
    return ((TA_PORTION * TA_K_PADDED + c) * TA_PARTS + (TA_PARTS == 1 ? 0 : lane / 16)) * 8;
  }

  TA_INLINE void start(const ta_call& call, const ta_place& here, int lane) {
    const bool rests = lane % 16 >= 8;
#pragma unroll
    for (int c = 0; c < TA_K_PADDED; c++) {
      float x[8];
      unsigned rounded, rest;
      ta_load_query(call, here, lane % 8, first(c, lane), x);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        ta_split(x[2 * i], x[2 * i + 1], &rounded, &rest);
        (&q[c].x)[i] = rests ? rest : rounded;
      }
    }
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 8 * TA_SCORES; n++) o[n / (8 * TA_SCORES)][n / TA_SCORES % 8][n % TA_SCORES] = 0.f;
  }

  TA_INLINE void load_keys(const char* keys, int step, int key, int last, int lane) {
    const char* row = keys + (long long)ta_min(key + lane % 16, last) * step;
#pragma unroll
    for (int c = 0; c < TA_K_PADDED; c++) k[c] = ta_load(row, first(c, lane), TA_D);
  }

  TA_INLINE void load_values(const char* values, int step, int key, int last, int lane) {
#pragma unroll
    for (int i = 0; i < TA_TERMS; i++) {
      const char* value = values + (long long)ta_min(key + ta_term_key(i, lane), last) * step;
#pragma unroll
      for (int c = 0; c < TA_V_LOADS; c++) v[c][i] = ta_load(value, value_load(c) + lane % 16 * 8, TA_DV);
    }
  }

  TA_INLINE void score(float* x) const {
    float sums[TA_SCORES];
#pragma unroll
    for (int i = 0; i < TA_SCORES; i++) sums[i] = 0.f;
#pragma unroll
    for (int i = 0; i < TA_K_PADDED * 8 / TA_TERMS; i++) ta_multiply(sums, ta_terms_of(k, i), ta_terms_of(q, i));
    const bool rests = threadIdx.x % 16 >= 8;
#pragma unroll
    for (int i = 0; i < TA_SCORES; i++) {
      const float other = TA_SHUFFLE_XOR(sums[i], 8, TA_WAVE);
      x[i] = rests ? ta_score(other, sums[i]) : ta_score(sums[i], other);
    }
  }

  TA_INLINE void rescale(float factor, int) {
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 8 * TA_SCORES; n++) o[n / (8 * TA_SCORES)][n / TA_SCORES % 8][n % TA_SCORES] *= factor;
  }

  TA_INLINE bool clear() {
    bool found = false;
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * TA_TERMS; n++) {
      const bool here = ta_clear_piece(&v[n / TA_TERMS][n % TA_TERMS]);
      found = found || here;
    }
    return found;
  }

  TA_INLINE void add(const float* weights, int lane) {
    const bool rests = lane % 16 >= 8;
    ta_terms p, values;
#pragma unroll
    for (int w = 0; w < TA_SCORES / 2; w++) {
      unsigned rounded, rest;
      ta_split(weights[2 * w], weights[2 * w + 1], &rounded, &rest);
      p.words[w] = rests ? rest : rounded;
    }
#if defined(TA_WMMA) && TA_WMMA == 11
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const unsigned own = p.words[w], other = TA_SHUFFLE_XOR(own, 16, TA_WAVE);
      p.words[w] = lane < 16 ? own : other;
      p.words[w + 4] = lane < 16 ? other : own;
    }
#endif
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 8; n++) {
      const int c = n / 8, e = n % 8;
#pragma unroll
      for (int w = 0; w < TA_TERMS / 2; w++) {
        const unsigned a = (&v[c][2 * w].x)[e / 2], b = (&v[c][2 * w + 1].x)[e / 2];
        values.words[w] = e % 2 ? ta_high_halves(a, b) : ta_low_halves(a, b);
      }
      ta_multiply(o[c][e], values, p);
    }
  }

  // Columns of rests take no part: the infinity would be added twice.
  TA_INLINE void add_cleared(const char* row, float weight, int lane) {
    if (lane % 16 >= 8) return;
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 8 * TA_SCORES; n++) {
      const int c = n / (8 * TA_SCORES), e = n / TA_SCORES % 8, i = n % TA_SCORES, at = element(c, e, i, lane);
      const float x = at < TA_DV ? ta_type<TA_V_TYPE>::one(row + at * 2) : 0.f;
      if (!(fabsf(x) < TA_INF)) o[c][e][i] += weight * x;
    }
  }

  TA_INLINE void leave(float* sm_o, int lane) const {
#pragma unroll
    for (int n = 0; n < TA_V_LOADS * 8 * TA_SCORES; n++) {
      const int c = n / (8 * TA_SCORES), e = n / TA_SCORES % 8, i = n % TA_SCORES, at = element(c, e, i, lane);
      const float sum = o[c][e][i] + TA_SHUFFLE_XOR(o[c][e][i], 8, TA_WAVE);
      if (at < TA_DV && lane % 16 < 8) sm_o[lane % 8 * TA_DV + at] = sum * (1.f / TA_P_SCALE);
    }
  }
};
