/* blend_avx512.c: blend_lanes.h, 8 chunks a vector. */
#include "blend_chunks.h"

#if BINIDX_X86
#define TARGET BINIDX_TARGET_AVX512
#define UNROLL _Pragma("GCC unroll 16")
enum { W = 8, GROUPS = 2 };
typedef __m512d V;
typedef __mmask8 M;
#define SPLAT(x) _mm512_set1_pd(x)
#define LOAD(p) _mm512_loadu_pd(p)
#define STORE(p, a) _mm512_storeu_pd(p, a)
#define ADD(a, b) _mm512_add_pd(a, b)
#define SUB(a, b) _mm512_sub_pd(a, b)
#define MUL(a, b) _mm512_mul_pd(a, b)
#define MAX(a, b) _mm512_max_pd(a, b)
#define GT(a, b) _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ)
#define GE(a, b) _mm512_cmp_pd_mask(a, b, _CMP_GE_OQ)
#define EQ(a, b) _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ)
#define PICK(m, yes, no) _mm512_mask_mov_pd(no, m, yes)

/* The numbers first .. first + 7 of the set lanes, written from datasets[found] on; returns found plus how many. */
TARGET BINIDX_BLEND_INLINE int64_t KEEP(int32_t *datasets, int64_t found, int64_t first, M set) {
    __m256i numbers = _mm256_add_epi32(_mm256_set1_epi32((int)first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    _mm256_storeu_si256((__m256i *)(datasets + found), _mm256_maskz_compress_epi32(set, numbers));
    return found + __builtin_popcount(set);
}

/* Columns of 8 rows of 8: pairs of rows, then halves, then quarters change places. */
TARGET BINIDX_BLEND_INLINE void transpose(const double *from, int64_t stride, V *columns) {
    UNROLL
    for (int odd = 0; odd < 2; odd++) {
        V pairs[4], low, high;
        for (int k = 0; k < 4; k++) {
            V one = LOAD(from + 2 * k * stride), two = LOAD(from + (2 * k + 1) * stride);
            pairs[k] = odd ? _mm512_unpackhi_pd(one, two) : _mm512_unpacklo_pd(one, two);
        }
        low = _mm512_shuffle_f64x2(pairs[0], pairs[1], 0x44), high = _mm512_shuffle_f64x2(pairs[2], pairs[3], 0x44);
        columns[odd] = _mm512_shuffle_f64x2(low, high, 0x88);
        columns[odd + 2] = _mm512_shuffle_f64x2(low, high, 0xdd);
        low = _mm512_shuffle_f64x2(pairs[0], pairs[1], 0xee), high = _mm512_shuffle_f64x2(pairs[2], pairs[3], 0xee);
        columns[odd + 4] = _mm512_shuffle_f64x2(low, high, 0x88);
        columns[odd + 6] = _mm512_shuffle_f64x2(low, high, 0xdd);
    }
}

/* 8 rows of 8 lanes into 8 runs of 8 rows, `length` apart. */
TARGET BINIDX_BLEND_INLINE int TURN(const double *picks, const double *numbers, int64_t stride, int16_t *datasets,
                                    int64_t *samples, int64_t length) {
    V of_lane[W];
    transpose(picks, stride, of_lane);
    for (int lane = 0; lane < W; lane++) {
        __m128i eight = _mm256_cvtepi32_epi16(_mm512_cvttpd_epi32(of_lane[lane]));
        _mm_storeu_si128((__m128i *)(datasets + lane * length), eight);
    }
    transpose(numbers, stride, of_lane);
    for (int lane = 0; lane < W; lane++)
        _mm512_storeu_si512(samples + lane * length, _mm512_cvttpd_epi64(of_lane[lane]));
    return 1;
}

#include "blend_lanes.h"
const binidx_blend_level binidx_blend_avx512 = {GROUPS * W, chunks, replay};
#endif
