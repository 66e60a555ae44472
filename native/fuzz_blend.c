/* fuzz_blend.c: blends of any sizes, weights, chunks and guesses, at every level, against the plain scan of blend_index.c.
 *
 * Input: kind 1, datasets 2, rows 2, rows of a chunk 1, then a byte a weight (or size), again from the first when they end.
 * kind: bit 0 exhaustive; 1 weights 1e-9 apart instead of ratios of bytes; 2 guesses that are a few samples wrong;
 * 3 guesses that are anything; the rest is how many datasets and rows are divided by.
 */
#include "binidx.h"
#include "fuzz.h"

#include <math.h>

typedef struct {
    int64_t num, width, rows, chunk;
    double *weights, *limits;
    int64_t *sizes;
    int exhaustive, guess;
} input;

static input read_input(const uint8_t *data, size_t size) {
    uint8_t head[6] = {0};
    memcpy(head, data, size < 6 ? size : 6);
    input in = {.exhaustive = head[0] & 1, .guess = head[0] >> 2 & 3, .chunk = head[5]};
    in.num = 1 + (head[1] + head[2] * 256) % 1200 / (1 << (head[0] >> 4) % 4 * 2);
    in.rows = (head[3] + head[4] * 256) % 1500 / (1 << (head[0] >> 6));
    in.width = (in.num + 15) / 16 * 16;
    in.weights = bytes_of(in.width * 8), in.limits = bytes_of(in.width * 8), in.sizes = bytes_of(in.num * 8);
    double sum = 0;
    int64_t total = 0;
    for (int64_t d = 0; d < in.width; d++) {
        uint8_t byte = size > 6 ? data[6 + (size_t)d % (size - 6)] : 1;
        in.weights[d] = d >= in.num ? 0 : head[0] & 2 ? 1 + 1e-9 * byte : 1.0 + byte;
        in.limits[d] = d >= in.num ? 0 : byte % 8;
        sum += in.weights[d];
        if (d < in.num) total += in.sizes[d] = byte % 8;
    }
    if (in.exhaustive) in.rows = total, sum = total ? (double)total : 1;
    for (int64_t d = 0; d < in.num; d++) in.weights[d] = (in.exhaustive ? in.limits[d] : in.weights[d]) / sum;
    return in;
}

static void plain(const input *in, int16_t *datasets, int64_t *samples) {
    double *weights = bytes_of(in->num * 8), *counts = bytes_of(in->num * 8);
    int16_t *open = bytes_of(in->num * 2);
    if (in->exhaustive)
        binidx_blend_exhaustive(in->sizes, in->num, in->rows, weights, counts, open, datasets, samples);
    else binidx_blend_weighted(in->weights, in->num, in->rows, counts, datasets, samples);
    free(weights), free(counts), free(open);
}

static void guess(const input *in, int64_t sample, double *counts) {
    for (int64_t d = 0; d < in->width; d++) {
        counts[d] = (double)(int64_t)(in->weights[d] * (double)sample + 0.5);
        if (sample && in->guess & 1) counts[d] += (double)((d * 7 + sample) % 3);
        if (sample && in->guess & 2) counts[d] = (double)((d * 167 + sample) % 251);
        if (d >= in->num || (in->exhaustive && counts[d] >= in->limits[d])) counts[d] = INFINITY;
    }
}

/* As native/blend_index.py does: chunks from guesses, then replay where they meet. */
static void in_chunks(const input *in, const binidx_blend *blend, int level) {
    int64_t lanes = binidx_blend_lanes(level), length = in->chunk, first = 0;
    double *counts = bytes_of(in->width * 8), *guesses = bytes_of(lanes * in->width * 8), *ends;
    ends = bytes_of(lanes * in->width * 8);
    guess(in, 0, counts);
    for (; length && first + lanes * length <= in->rows; first += lanes * length) {
        for (int64_t k = 0; k < lanes; k++) guess(in, first + k * length, guesses + k * in->width);
        memcpy(ends, guesses, (size_t)(lanes * in->width * 8));
        binidx_blend_chunks(blend, level, first, length, ends);
        for (int64_t k = 0; k < lanes; k++) {
            int64_t from = first + k * length;
            if (binidx_blend_replay(blend, level, from, from + length, counts, guesses + k * in->width) < length)
                memcpy(counts, ends + k * in->width, (size_t)(in->width * 8));
        }
    }
    binidx_blend_replay(blend, level, first, in->rows, counts, NULL);
    free(counts), free(guesses), free(ends);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = read_input(data, size);
    int16_t *needed = bytes_of(in.rows * 2), *found = bytes_of(in.rows * 2);
    int64_t *needed_samples = bytes_of(in.rows * 8), *found_samples = bytes_of(in.rows * 8);
    plain(&in, needed, needed_samples);
    for (int level = BINIDX_PORTABLE; level <= binidx_cpu_level(); level++) {
        memset(found, 255, (size_t)in.rows * 2), memset(found_samples, 255, (size_t)in.rows * 8);
        binidx_blend blend = {in.weights, in.exhaustive ? in.limits : NULL, in.num, in.width, found, found_samples};
        in_chunks(&in, &blend, level);
        if (memcmp(found, needed, (size_t)in.rows * 2) != 0) abort();
        if (memcmp(found_samples, needed_samples, (size_t)in.rows * 8) != 0) abort();
        if (level == BINIDX_PORTABLE) note(found, in.rows * 2), note(found_samples, in.rows * 8);
    }
    free(in.weights), free(in.limits), free(in.sizes);
    free(needed), free(found), free(needed_samples), free(found_samples);
    return 0;
}
