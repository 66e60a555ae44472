/* shuffle_targets.c: what the steps of NumPy's legacy RandomState.shuffle swap with.
 *
 *     i = n-1 .. 1:  the target is a number in [0, i], uniform     mask = 2^b - 1 >= i, the smallest
 *                    word & mask > i: drawn again
 *
 * i up to 2^32 - 1 draws 32-bit words; beyond it, two words a try, the high one first. Whether a word is accepted depends
 * on how many before it were, but of a GROUP of words under one mask only few can tell:
 *
 *     0 ............ i-GROUP+1 ............ i ............ mask
 *        accepted                unsure       rejected           unsure in one group of mask / GROUP^2: again, in order
 *
 * so a group is compared at once and its accepted words move together, by AVX-512's compress or AVX2's permutation.
 * Cost of a target, 1.39 words on average: 1.1 ns in plain C, 0.5 with AVX2, 0.3 with AVX-512 (Zen 5).
 * NEON runs the plain C: not yet measured there.
 * Source: NumPy, RandomState.shuffle over random_interval (frozen by NEP 19); the groups are ours.
 */
#include "shuffle_targets.h"

/* The smallest 2^b - 1 >= i. */
static uint64_t mask_of(uint64_t i) {
    for (int shift = 1; shift < 64; shift *= 2) i |= i >> shift;
    return i;
}

/* The accepted among `tries` words in their order; their number. */
static int64_t accept(const uint32_t *words, int64_t tries, uint32_t mask, uint32_t i, uint32_t *targets) {
    int64_t made = 0;
    for (int64_t w = 0; w < tries; w++) { /* no branch: it would be mispredicted at every third word */
        uint32_t target = words[w] & mask, accepted = target <= i;
        targets[made] = target;
        made += accepted;
        i -= accepted;
    }
    return made;
}

/* accept() of GROUP words with i >= GROUP, or -1 where a word is unsure; may write all of targets[0 .. GROUP-1]. */
static int64_t accept_portable(const uint32_t *words, uint32_t mask, uint32_t i, uint32_t *targets) {
    const uint32_t low = i - GROUP + 1;
    uint32_t unsure = 0;
    int64_t made = 0;
    for (int w = 0; w < GROUP; w++) unsure |= (words[w] & mask) - low - 1 < GROUP - 1;
    for (int w = 0; w < GROUP; w++) {
        targets[made] = words[w] & mask;
        made += targets[made] <= low;
    }
    return unsure ? -1 : made;
}

#if BINIDX_X86

/* MOVES[m]: the byte k is the place of the k-th bit that is set in m. */
#define ONES_2(m) (((m) & 1) + ((m) >> 1 & 1))
#define ONES(m) (ONES_2(m) + ONES_2((m) >> 2) + ONES_2((m) >> 4) + ONES_2((m) >> 6))
#define PLACE(m, j) ((uint64_t)((m) >> (j) & 1 ? (j) : 0) << 8 * ONES((m) & ((1 << (j)) - 1)))
#define MOVE(m) PLACE(m, 1) | PLACE(m, 2) | PLACE(m, 3) | PLACE(m, 4) | PLACE(m, 5) | PLACE(m, 6) | PLACE(m, 7)
#define MOVES_4(m) MOVE(m), MOVE(m + 1), MOVE(m + 2), MOVE(m + 3)
#define MOVES_16(m) MOVES_4(m), MOVES_4(m + 4), MOVES_4(m + 8), MOVES_4(m + 12)
#define MOVES_64(m) MOVES_16(m), MOVES_16(m + 16), MOVES_16(m + 32), MOVES_16(m + 48)
static const uint64_t MOVES[256] = {MOVES_64(0), MOVES_64(64), MOVES_64(128), MOVES_64(192)};

BINIDX_TARGET_AVX2 static int64_t accept_avx2(const uint32_t *words, uint32_t mask, uint32_t i, uint32_t *targets) {
    const __m256i masks = _mm256_set1_epi32((int)mask);
    const __m256i high = _mm256_set1_epi32((int)i), low = _mm256_set1_epi32((int)(i - GROUP + 1));
    __m256i unsure = _mm256_setzero_si256();
    int64_t made = 0;
    for (int w = 0; w < GROUP; w += 8) {
        __m256i v = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(words + w)), masks);
        __m256i sure = _mm256_cmpeq_epi32(_mm256_max_epu32(v, low), low); /* v <= low, unsigned */
        __m256i likely = _mm256_cmpeq_epi32(_mm256_max_epu32(v, high), high);
        int accepted = _mm256_movemask_ps(_mm256_castsi256_ps(sure));
        __m256i moves = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(MOVES + accepted)));
        unsure = _mm256_or_si256(unsure, _mm256_xor_si256(sure, likely));
        _mm256_storeu_si256((__m256i *)(targets + made), _mm256_permutevar8x32_epi32(v, moves));
        made += __builtin_popcount((unsigned)accepted);
    }
    return _mm256_testz_si256(unsure, unsure) ? made : -1;
}

/* Compressed in the register: straight to memory takes Zen 4 100 cycles. */
BINIDX_TARGET_AVX512 static int64_t accept_avx512(const uint32_t *words, uint32_t mask, uint32_t i, uint32_t *targets) {
    const __m512i masks = _mm512_set1_epi32((int)mask);
    const __m512i high = _mm512_set1_epi32((int)i), low = _mm512_set1_epi32((int)(i - GROUP + 1));
    unsigned unsure = 0;
    int64_t made = 0;
    for (int w = 0; w < GROUP; w += 16) {
        __m512i v = _mm512_and_si512(_mm512_loadu_si512(words + w), masks);
        unsigned sure = _mm512_cmple_epu32_mask(v, low);
        unsure |= sure ^ _mm512_cmple_epu32_mask(v, high);
        _mm512_storeu_si512(targets + made, _mm512_maskz_compress_epi32((__mmask16)sure, v));
        made += __builtin_popcount(sure);
    }
    return unsure ? -1 : made;
}
#endif

static int64_t accept_group(int level, const uint32_t *words, uint32_t mask, uint32_t i, uint32_t *targets) {
    switch (level) {
#if BINIDX_X86
    case BINIDX_AVX512: return accept_avx512(words, mask, i, targets);
    case BINIDX_AVX2: return accept_avx2(words, mask, i, targets);
#endif
    default: return accept_portable(words, mask, i, targets);
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t binidx_some_targets(binidx_mt19937 *rng, uint32_t i, int64_t most, int64_t room, uint32_t *targets) {
    const uint32_t mask = (uint32_t)mask_of(i);
    const int64_t needed = least(most, i - mask / 2);
    int64_t made = 0;
    while (made < needed && made + GROUP <= room) {
        if (rng->position == BLOCK) binidx_mt19937_next_block(rng);
        /* A word makes at most one target: so many words never make a target too many. */
        int64_t tries = least(least(GROUP, needed - made), BLOCK - rng->position), got;
        const uint32_t *words = rng->words + rng->position;
        if (tries < GROUP || (got = accept_group(rng->level, words, mask, i, targets + made)) < 0)
            got = accept(words, tries, mask, i, targets + made);
        rng->position += tries;
        made += got;
        i -= (uint32_t)got;
    }
    return made;
}

/* The first targets of steps i, i-1, ... > UINT32_MAX, until the mask changes. */
static int64_t some_wide_targets(binidx_mt19937 *rng, uint64_t i, int64_t most, int64_t *targets) {
    const uint64_t mask = mask_of(i);
    const int64_t needed = least(most, (int64_t)(i - mask / 2));
    for (int64_t made = 0; made < needed;) {
        uint64_t target = next_two_words(rng) & mask;
        if (target > i) continue;
        targets[made++] = (int64_t)target;
        i--;
    }
    return needed;
}

static int64_t some_narrow_targets(binidx_mt19937 *rng, uint32_t i, int64_t most, int64_t *targets) {
    uint32_t narrow[BLOCK];
    int64_t made = binidx_some_targets(rng, i, most, BLOCK, narrow);
    for (int64_t k = 0; k < made; k++) targets[k] = narrow[k];
    return made;
}

void binidx_shuffle_targets(binidx_mt19937 *rng, int64_t first, int64_t count, int64_t *targets) {
    for (int64_t made = 0; made < count;) {
        int64_t i = first - made;
        made += i > UINT32_MAX ? some_wide_targets(rng, (uint64_t)i, count - made, targets + made)
                               : some_narrow_targets(rng, (uint32_t)i, count - made, targets + made);
    }
}
