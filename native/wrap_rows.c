/* wrap_rows.c: token ids as a .bin stores them, with fixed ids before and behind each row.
 *
 *     ids       5 6 | 7 | | 8                  a row a text or a document
 *     out       1 5 6 0 | 1 7 0 | | 1 8 0      prefix 1, suffix 0, none for what is empty, in 2 bytes each
 *
 * An id that the width does not hold is found by the bitwise or of all of them, so the loop that narrows has no branch.
 *
 * Cost: one pass, 6 bytes moved an id of 2 bytes. Source: us.
 */
#include <string.h>
#include "binidx.h"

static uint32_t put_u16(uint16_t *out, const uint32_t *ids, int64_t count) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < count; i++) seen |= ids[i], out[i] = (uint16_t)ids[i];
    return seen;
}

static uint32_t put_u32(uint32_t *out, const uint32_t *ids, int64_t count) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < count; i++) seen |= ids[i], out[i] = ids[i];
    return seen;
}

/* `count` ids from `at` on; returns the bitwise or of all. */
static uint32_t put(const binidx_wrapping *w, int64_t at, const uint32_t *ids, int64_t count) {
    if (w->item_bytes == 2) return put_u16((uint16_t *)w->out + at, ids, count);
    return put_u32((uint32_t *)w->out + at, ids, count);
}

int64_t binidx_wrap_rows(const binidx_wrapping *w) {
    uint32_t seen = 0;
    int64_t at = 0, before = 0;
    for (int64_t row = 0; row < w->num_rows; row++) {
        int64_t first = w->offsets[row], stop = w->offsets[row + 1], count = stop - first;
        if (first < before || stop < first || stop > w->num_ids) return BINIDX_BAD_DOCUMENT;
        before = first;
        if (count == 0 && !w->empty_too) continue;
        if (count + w->num_prefix + w->num_suffix > w->room - at) return BINIDX_BAD_TOKENS;
        seen |= put(w, at, w->prefix, w->num_prefix), at += w->num_prefix;
        seen |= put(w, at, w->ids + first, count), at += count;
        seen |= put(w, at, w->suffix, w->num_suffix), at += w->num_suffix;
    }
    return seen > w->largest ? BINIDX_BAD_ID : at;
}
