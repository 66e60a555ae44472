/* fuzz_gather.c: batches of any pieces, bounds and rows, at every level against their definition.
 *
 * Input: sequence length 1, samples 1, pieces 1, dtype 1, flags 1, then two bytes a piece, one a bound, one a row; the
 * rest are the stored tokens; missing bytes are 0. Flags: 1 mask EOD, 2 positions, 4 bounds and rows that are right.
 */
#include "binidx.h"
#include "fuzz.h"

enum { PAD = 7, EOD = 9, ROWS = 4 };

static int64_t stored_token(const binidx_gather *g, const uint8_t *at) {
    int16_t i16;
    uint16_t u16;
    memcpy(&i16, at, g->item_bytes == 2 ? 2 : 1);
    memcpy(&u16, at, g->item_bytes == 2 ? 2 : 1);
    return g->dtype == 1 ? *at : g->dtype == 2 ? (int8_t)*at : g->dtype == 3 ? i16 : u16;
}

/* Token number t of a sample, PAD past its end. */
static int64_t text_at(const binidx_gather *g, int64_t sample, int64_t t) {
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        int64_t first = g->ranges[2 * piece], count = (g->ranges[2 * piece + 1] - first) / g->item_bytes;
        if (t < count) return stored_token(g, (const uint8_t *)(uintptr_t)g->base + first + t * g->item_bytes);
        t -= count;
    }
    return PAD;
}

static void check_row(const binidx_gather *g, int64_t sample) {
    int64_t first = g->rows[sample] * g->sequence_length, start = 0;
    for (int64_t later = sample + 1; later < g->num_samples; later++)
        if (g->rows[later] == g->rows[sample]) return; /* written over */
    for (int64_t t = 0; t < g->sequence_length; t++) {
        int64_t token = text_at(g, sample, t), label = text_at(g, sample, t + 1);
        same(g->tokens[first + t] == (token == PAD ? 0 : token));
        same(g->labels[first + t] == (label == PAD ? 0 : label));
        same(g->loss_mask[first + t] == (float)(label != PAD && !(g->mask_eod && token == EOD)));
        if (g->positions) same(g->positions[first + t] == t - start);
        if (token == EOD) start = t + 1;
    }
}

static int64_t item_bytes_of(int dtype) { return dtype == 3 || dtype == 8 ? 2 : 1; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int32_t dtypes[] = {1, 2, 3, 8};
    fuzz_input in = {data, size};
    binidx_gather g = {.pad = PAD, .eod = EOD, .num_rows = ROWS};
    g.sequence_length = 1 + next(&in, 1) % 70, g.num_samples = next(&in, 1) % 5, g.num_pieces = next(&in, 1) % 20;
    g.dtype = dtypes[next(&in, 1) % 4], g.item_bytes = item_bytes_of(g.dtype);
    int64_t flags = next(&in, 1), right = flags & 4;
    int64_t *ranges = bytes_of(16 * g.num_pieces), *bounds = bytes_of(8 * (g.num_samples + 1));
    int64_t *rows = bytes_of(8 * g.num_samples), cells = ROWS * g.sequence_length;
    uint8_t stored[256];
    for (int64_t p = 0; p < g.num_pieces; p++) {
        ranges[2 * p] = next(&in, 1) / 2;
        ranges[2 * p + 1] = ranges[2 * p] + next(&in, 1) % 40 * (right ? g.item_bytes : 1) - (right ? 0 : 2);
    }
    for (int64_t s = 0; s <= g.num_samples; s++) {
        bounds[s] = next(&in, 1) % (g.num_pieces + 2) - !right;
        if (right) bounds[s] = s == 0 ? 0 : s == g.num_samples || bounds[s] > g.num_pieces ? g.num_pieces : bounds[s];
        if (right && s && bounds[s] < bounds[s - 1]) bounds[s] = bounds[s - 1];
    }
    for (int64_t s = 0; s < g.num_samples; s++) rows[s] = next(&in, 1) % (right ? ROWS : ROWS + 1);
    for (size_t i = 0; i < sizeof stored; i++) stored[i] = (uint8_t)next(&in, 1);
    g.base = (int64_t)(uintptr_t)stored, g.ranges = ranges, g.bounds = bounds, g.rows = rows, g.mask_eod = flags & 1;
    for (int level = 0; level <= binidx_cpu_level(); level++) {
        g.tokens = bytes_of(8 * cells), g.labels = bytes_of(8 * cells), g.loss_mask = bytes_of(4 * cells);
        g.positions = flags & 2 ? bytes_of(8 * cells) : NULL;
        int64_t code = binidx_gather_samples(&g, level);
        same(code < 0 || code == g.num_samples);
        for (int64_t s = 0; code > 0 && s < g.num_samples; s++) check_row(&g, s);
        if (code < 0) same(g.tokens[0] == (int64_t)0xa5a5a5a5a5a5a5a5ull);
        free(g.tokens), free(g.labels), free(g.loss_mask), free(g.positions);
    }
    free(ranges), free(bounds), free(rows);
    return 0;
}
