/* blend_index.c: which dataset each sample of a blend is drawn from.
 *
 *     sample s    goes to the dataset furthest behind its share:   weight * max(s, 1) - drawn so far
 *
 *     weights 0.5 0.3 0.2:   0 1 2 0 1 0 2 0 1 0 ...               a tie goes to the lowest number
 *
 * The order hangs on rounded doubles: the product is rounded, then the difference. Never compile this with contraction
 * (-ffp-contract=off): a fused multiply-add changes up to a fifth of the rows of a blend with ties.
 * Cost: one pass over the datasets a sample. Source: Megatron Core, build_blending_indices and
 * build_exhaustive_blending_indices as its x86-64 wheels compute them; there a size of 0 is drawn from and never ends.
 */
#include "binidx.h"

#include <float.h>
#include <string.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "blends need doubles rounded to double at every step (on 32-bit x86: -msse2 -mfpmath=sse)"
#endif

static inline int64_t furthest_behind(const double *weights, const double *counts, int64_t num_datasets, int64_t sample) {
    double drawn = sample < 1 ? 1.0 : (double)sample, most = weights[0] * drawn - counts[0];
    int64_t furthest = 0;
    for (int64_t d = 1; d < num_datasets; d++) {
        double behind = weights[d] * drawn - counts[d];
        if (behind > most) most = behind, furthest = d;
    }
    return furthest;
}

void binidx_blend_weighted(const double *weights, int64_t num_datasets, int64_t size, double *counts,
                           int16_t *dataset_index, int64_t *dataset_sample_index) {
    for (int64_t d = 0; d < num_datasets; d++) counts[d] = 0; /* exact as doubles: below 2^53 */
    for (int64_t s = 0; s < size; s++) {
        int64_t d = furthest_behind(weights, counts, num_datasets, s);
        dataset_index[s] = (int16_t)d;
        dataset_sample_index[s] = (int64_t)counts[d]++;
    }
}

void binidx_blend_exhaustive(const int64_t *sizes, int64_t num_datasets, int64_t total, double *weights, double *counts,
                             int16_t *open, int16_t *dataset_index, int64_t *dataset_sample_index) {
    int64_t num_open = 0; /* datasets that still have samples, in rising order, side by side in the three arrays */
    for (int64_t d = 0; d < num_datasets; d++) {
        if (sizes[d] == 0) continue;
        weights[num_open] = (double)sizes[d] / (double)total;
        counts[num_open] = 0;
        open[num_open++] = (int16_t)d;
    }
    for (int64_t s = 0; s < total; s++) {
        int64_t k = furthest_behind(weights, counts, num_open, s);
        dataset_index[s] = open[k];
        dataset_sample_index[s] = (int64_t)counts[k]++;
        if ((int64_t)counts[k] < sizes[open[k]]) continue;
        size_t after = (size_t)(--num_open - k);
        memmove(weights + k, weights + k + 1, after * sizeof *weights);
        memmove(counts + k, counts + k + 1, after * sizeof *counts);
        memmove(open + k, open + k + 1, after * sizeof *open);
    }
}
