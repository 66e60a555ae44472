/* fuzz_wrap_rows.c: rows of any offsets, wrapped, against their definition.
 *
 * Input: rows 1, prefix 1, suffix 1, flags 1, room 1, then one byte an offset and four an id; missing bytes are 0.
 * Flags: 1 two bytes an id, 2 empty rows too, 4 offsets that are right, 8 small ids.
 */
#include "binidx.h"
#include "fuzz.h"

enum { IDS = 40 };

static uint32_t stored(const binidx_wrapping *w, int64_t at) {
    return w->item_bytes == 2 ? ((const uint16_t *)w->out)[at] : ((const uint32_t *)w->out)[at];
}

static int64_t check_ids(const binidx_wrapping *w, int64_t at, const uint32_t *ids, int64_t count, int *wide) {
    uint32_t mask = w->item_bytes == 2 ? 0xffff : 0xffffffff;
    for (int64_t i = 0; i < count; i++) *wide |= ids[i] > w->largest, same(stored(w, at++) == (ids[i] & mask));
    return at;
}

/* One after the other what must stand in `out`; *wide: whether an id is more than the largest. */
static int64_t check_out(const binidx_wrapping *w, int *wide) {
    *wide = 0;
    int64_t at = 0;
    for (int64_t r = 0; r < w->num_rows; r++) {
        if (w->offsets[r] == w->offsets[r + 1] && !w->empty_too) continue;
        at = check_ids(w, at, w->prefix, w->num_prefix, wide);
        at = check_ids(w, at, w->ids + w->offsets[r], w->offsets[r + 1] - w->offsets[r], wide);
        at = check_ids(w, at, w->suffix, w->num_suffix, wide);
    }
    return at;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    binidx_wrapping w = {.num_ids = IDS, .num_rows = next(&in, 1) % 20};
    w.num_prefix = next(&in, 1) % 3, w.num_suffix = next(&in, 1) % 3;
    int64_t flags = next(&in, 1);
    w.room = next(&in, 1), w.item_bytes = flags & 1 ? 2 : 4, w.empty_too = flags >> 1 & 1;
    w.largest = w.item_bytes == 2 ? 0xffff : 0x7fffffff;
    int64_t *offsets = bytes_of(8 * (w.num_rows + 1)), most = 0;
    for (int64_t r = 0; r <= w.num_rows; r++) {
        offsets[r] = next(&in, 1) % (IDS + 2) - (flags & 4 ? 0 : 1);
        if (flags & 4) offsets[r] = offsets[r] > IDS ? IDS : offsets[r] < most ? most : offsets[r];
        most = offsets[r] > most ? offsets[r] : most;
    }
    uint32_t *ids = bytes_of(4 * IDS), *wraps = bytes_of(4 * 4);
    int wide;
    for (int i = 0; i < 4; i++) wraps[i] = (uint32_t)next(&in, 1);
    for (int i = 0; i < IDS; i++) ids[i] = (uint32_t)next(&in, 4) & (flags & 8 ? 0x7fff : 0xffffffff);
    w.ids = ids, w.offsets = offsets, w.prefix = wraps, w.suffix = wraps + 2, w.out = bytes_of(w.room * w.item_bytes);
    int64_t code = binidx_wrap_rows(&w);
    if (flags & 4) same(code != BINIDX_BAD_DOCUMENT);
    if (code >= 0) same(code == check_out(&w, &wide) && !wide);
    if (code == BINIDX_BAD_ID) check_out(&w, &wide), same(wide);
    note(&code, 8);
    if (code > 0) note(w.out, code * w.item_bytes);
    free(offsets), free(ids), free(wraps), free(w.out);
    return 0;
}
