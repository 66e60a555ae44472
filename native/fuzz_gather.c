/* fuzz_gather.c: batches of any pieces, bounds and rows, at every level against their definition.
 *
 * Input: sequence length 1, samples 1, pieces 1, dtype 1, flags 1, then two bytes a piece, one a bound, one a row; the
 * rest are the stored tokens; missing bytes are 0. Flags: 1 mask EOD, 2 an extra token, 4 bounds and rows that are right,
 * 8 positions after each EOD, 16 in each piece.
 */
#include "fuzz_rows.h"

static int64_t item_bytes_of(int dtype) { return dtype == 3 || dtype == 8 ? 2 : 1; }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const int32_t dtypes[] = {1, 2, 3, 8};
    fuzz_input in = {data, size};
    binidx_gather g = {.pad = PAD, .eod = EOD, .num_rows = ROWS};
    g.sequence_length = 1 + next(&in, 1) % 70, g.num_samples = next(&in, 1) % 5, g.num_pieces = next(&in, 1) % 20;
    g.dtype = dtypes[next(&in, 1) % 4], g.item_bytes = item_bytes_of(g.dtype);
    int64_t flags = next(&in, 1), right = flags & 4;
    int64_t *ranges = bytes_of(16 * g.num_pieces), *bounds = bytes_of(8 * (g.num_samples + 1));
    int64_t *rows = bytes_of(8 * g.num_samples);
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
    g.extra = flags >> 1 & 1, g.starts = flags & 16 ? BINIDX_EACH_PIECE : flags & 8 ? BINIDX_AFTER_EOD : 0;
    for (int level = 0; level <= binidx_cpu_level(); level++)
        for (int text = 0; text < 2; text++) {
            make_rows(&g, text);
            int64_t code = binidx_gather_samples(&g, level);
            same(code < 0 || code == g.num_samples);
            check_rows(&g, code >= 0);
            if (level == BINIDX_PORTABLE) note_rows(&g);
            free_rows(&g);
        }
    free(ranges), free(bounds), free(rows);
    return 0;
}
