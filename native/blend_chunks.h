/* blend_chunks.h: what the vector levels of a blend share (C only: cffi reads binidx.h alone). */
#ifndef BINIDX_BLEND_CHUNKS_H
#define BINIDX_BLEND_CHUNKS_H
#include "cpu.h"

#include <math.h>

/* What blend_lanes.h makes for one vector width. */
typedef struct {
    int64_t lanes;
    void (*chunks)(const binidx_blend *blend, int64_t first, int64_t length, double *counts);
    int64_t (*replay)(const binidx_blend *blend, int64_t first, int64_t stop, double *counts, double *guess);
} binidx_blend_level;

extern const binidx_blend_level binidx_blend_portable;
#if BINIDX_X86
extern const binidx_blend_level binidx_blend_avx2, binidx_blend_avx512;
#endif

#define BINIDX_BLEND_INLINE static inline __attribute__((always_inline))

/* What the weights are multiplied with at this sample. */
BINIDX_BLEND_INLINE double binidx_blend_drawn(int64_t sample) { return sample < 1 ? 1.0 : (double)sample; }

/* A count after one more: infinite once all is drawn, which puts the dataset behind every other for good. */
BINIDX_BLEND_INLINE double binidx_blend_after(const binidx_blend *blend, int64_t dataset, double count) {
    return blend->limits && count + 1 >= blend->limits[dataset] ? INFINITY : count + 1;
}

/* One row, and its count. An infinite count is drawn from only after a wrong guess, by which all was spent. */
BINIDX_BLEND_INLINE void binidx_blend_take(const binidx_blend *blend, int64_t sample, int64_t dataset, double *count) {
    blend->dataset_index[sample] = (int16_t)dataset;
    blend->dataset_sample_index[sample] = blend->limits && *count == INFINITY ? 0 : (int64_t)*count;
    *count = binidx_blend_after(blend, dataset, *count);
}

#endif
