/* blend_chunks.c: a blend in chunks that are begun from a guess, side by side, and repaired where they meet.
 *
 *     samples     0 ........... | n .......... | 2n ......... | 3n .........
 *     counts at   0 (known)       guess          guess          guess           weight * sample, rounded so that they
 *     its start                                                                 sum to `sample`: largest remainders up
 *     chunks      ------------>   ------------>  ------------>  ------------>   all at once, in lanes and in threads
 *     replay                      --==========   -==========    ---=========    from the true counts until they are
 *                                                                               those that the guess has led to
 *
 * Why the repair is exact: the rest of a run depends on the sample number and the counts alone. Replay starts from the
 * true counts at the chunk's start and follows the rule, while the guess's counts are followed by reading the rows that
 * were written. Where the two are equal, all that was written from there on, and the counts at the end, are what the
 * rule gives. Where they never are, replay has written the whole chunk by the rule: a bad guess costs time, not a row.
 * Why it is soon: let A and B be counts at the same sample, x = A - B, and the rule pick a from A and b from B, a != b.
 * From wa*s - A[a] >= wb*s - A[b] and wb*s - B[b] >= wa*s - B[a] follows x[a] <= x[b]. x[a] gains one, x[b] loses one,
 * so the sum of |x| does not grow (x[a] = x[b] = 0 is the same comparison twice) and shrinks by 2 if x[a] < 0 < x[b].
 * This is the argument for weights that do not end and without rounding; measured with both: 0 to 20 samples of replay
 * a chunk for 8 datasets or less, about num_datasets for more, seldom ten times that.
 * Cost: see blend_few.h and blend_window.h; memory 16 bytes a dataset and chunk. Source: us; the rule is of
 * blend_index.c.
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
