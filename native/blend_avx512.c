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

#include "blend_lanes.h"
const binidx_blend_level binidx_blend_avx512 = {GROUPS * W, chunks, replay};
#endif
