/* blend_avx2.c: blend_lanes.h, 4 chunks a vector. */
#include "blend_chunks.h"

#if BINIDX_X86
#include <string.h>

#define TARGET BINIDX_TARGET_AVX2
#define TURN(...) 0 /* one at a time */
#define UNROLL _Pragma("GCC unroll 16")
enum { W = 4, GROUPS = 2 };
typedef __m256d V;
typedef __m256d M;
#define SPLAT(x) _mm256_set1_pd(x)
#define LOAD(p) _mm256_loadu_pd(p)
#define STORE(p, a) _mm256_storeu_pd(p, a)
#define ADD(a, b) _mm256_add_pd(a, b)
#define SUB(a, b) _mm256_sub_pd(a, b)
#define MUL(a, b) _mm256_mul_pd(a, b)
#define MAX(a, b) _mm256_max_pd(a, b)
#define GT(a, b) _mm256_cmp_pd(a, b, _CMP_GT_OQ)
#define GE(a, b) _mm256_cmp_pd(a, b, _CMP_GE_OQ)
#define EQ(a, b) _mm256_cmp_pd(a, b, _CMP_EQ_OQ)
#define PICK(m, yes, no) _mm256_blendv_pd(no, yes, m)

/* The numbers first .. first + 3 of the set lanes, written from datasets[found] on; returns found plus how many. The
 * four are bytes of one word: pext closes the gaps. */
TARGET BINIDX_BLEND_INLINE int64_t KEEP(int32_t *datasets, int64_t found, int64_t first, M set) {
    uint32_t bits = (uint32_t)_mm256_movemask_pd(set), bytes = _pdep_u32(bits, 0x01010101) * 0xff;
    __m128i numbers = _mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)_pext_u32(0x03020100, bytes)));
    _mm_storeu_si128((__m128i *)(datasets + found), _mm_add_epi32(numbers, _mm_set1_epi32((int)first)));
    return found + __builtin_popcount(bits);
}

#include "blend_lanes.h"
const binidx_blend_level binidx_blend_avx2 = {GROUPS * W, chunks, replay};
#endif
