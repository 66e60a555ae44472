/* blend_chunks.c: a blend in chunks that are begun from a guess, side by side, and repaired where they meet.
 *
 *     samples     0 ........... | n .......... | 2n ......... | 3n .........
 *     counts at   0 (known)       guess          guess          guess            weight * sample, rounded so that they
 *     its start                                                                  sum to `sample`: largest remainders up
 *     chunks      ------------>   ------------>  ------------>  ------------>    all at once, in lanes and in threads
 *     replay                      --==========   -==========    ---=========     from the true counts until they are the
 *                                                                                counts the guess has led to
 *
 * Why the repair is exact: the rest of a run depends on the sample number and the counts alone. Replay starts from the
 * true counts at the chunk's start and follows the rule, while the guess's counts are followed by reading the rows that
 * were written. Where the two are equal, all that was written from there on, and the counts at the end, are what the rule
 * gives. Where they never are, replay has written the whole chunk by the rule: a bad guess costs time, not a row.
 * Why it is soon: let A and B have drawn s samples each, and the rule pick a in A and b in B, a != b. Then
 * wa*s - A[a] >= wb*s - A[b] and wb*s - B[b] >= wa*s - B[a], so (B[a] - A[a]) + (A[b] - B[b]) >= 0: a tends to be short in
 * A, b in B. The L1 distance never grows by more than rounding makes it; picks that differ shrink it. Measured: 0 to 2
 * samples of replay a chunk for 8 datasets or less, about num_datasets for more.
 * Cost: see blend_few.h and blend_window.h; memory 16 bytes a dataset and chunk. Source: us; the rule is blend_index.c's.
 */
#include "blend_chunks.h"

static const binidx_blend_level *at_level(int level) {
#if BINIDX_X86
    if (level == BINIDX_AVX512) return &binidx_blend_avx512;
    if (level == BINIDX_AVX2) return &binidx_blend_avx2;
#endif
    (void)level;
    return &binidx_blend_portable;
}

int64_t binidx_blend_lanes(int level) { return at_level(level)->lanes; }

void binidx_blend_chunks(const binidx_blend *blend, int level, int64_t first, int64_t length, double *counts) {
    at_level(level)->chunks(blend, first, length, counts);
}

int64_t binidx_blend_replay(const binidx_blend *blend, int level, int64_t first, int64_t stop, double *counts,
                            double *guess) {
    return at_level(level)->replay(blend, first, stop, counts, guess);
}
