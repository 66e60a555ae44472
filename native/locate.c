/* locate.c: from samples to spans of tokens, and from spans to bytes.
 *
 *     samples served        17, -1                in the order of shuffle_index
 *     rows of sample_index  (3, 40) (5, 12)       where a sample starts and where the next one does
 *     document_index        .. 9 2 7 ..           the sequences between
 *     spans                 (9, 40, len-40) (2, 0, len) (7, 0, 12 + extra)        sequence, first token, tokens
 *     bytes                 pointer + first * item_bytes, each checked to lie in its sequence
 *
 * Cost: a row, a document and a length or pointer are a cache miss each; several samples are under way at once, AHEAD of
 * them asked for by name.
 */
#include "binidx.h"
#include "unaligned.h"
#include <string.h>

enum { AHEAD = 16, AT_ONCE = 8 };

static inline int64_t row_value(const binidx_orders *o, int64_t row, int column) {
    int64_t at = 2 * row + column;
    return o->wide_rows ? ((const int64_t *)o->sample_index)[at] : ((const int32_t *)o->sample_index)[at];
}

/* One line each: asking for the one after, which some reach into, costs more than it saves. */
static inline void prefetch_row(const binidx_orders *o, int64_t row) {
    __builtin_prefetch((const char *)o->sample_index + 2 * row * (o->wide_rows ? 8 : 4));
}

int64_t binidx_served_rows(const binidx_orders *o, const int64_t *served, int64_t count, int64_t *rows) {
    for (int64_t s = 0; s < count; s++) {
        int64_t number = served[s] < 0 ? served[s] + o->num_served : served[s];
        if (number < 0 || number >= o->num_served) return s;
        rows[s] = o->wide_shuffle ? ((const int64_t *)o->shuffle_index)[number]
                                  : ((const uint32_t *)o->shuffle_index)[number];
    }
    return count;
}

int64_t binidx_count_spans(const binidx_orders *o, const int64_t *rows, int64_t num_samples, int64_t *bounds) {
    bounds[0] = 0;
    for (int64_t s = 0; s < num_samples; s++) {
        int64_t later = s + AHEAD < num_samples ? rows[s + AHEAD] : 0;
        if (later > 0 && later < o->num_samples) prefetch_row(o, later);
        if (rows[s] < 0 || rows[s] >= o->num_samples) return BINIDX_BAD_DOCUMENT;
        int64_t first = row_value(o, rows[s], 0), last = row_value(o, rows[s] + 1, 0);
        if (first < 0 || last < first || last >= o->num_documents) return BINIDX_BAD_DOCUMENT;
        __builtin_prefetch(o->document_index + first);
        bounds[s + 1] = bounds[s] + last - first + 1;
    }
    return bounds[num_samples];
}

int64_t binidx_sample_spans(const binidx_orders *o, const int64_t *rows, int64_t num_samples, int64_t *spans) {
    int64_t n = 0;
    for (int64_t s = 0; s < num_samples; s++) {
        int64_t first = row_value(o, rows[s], 0), start = row_value(o, rows[s], 1);
        int64_t last = row_value(o, rows[s] + 1, 0), end = row_value(o, rows[s] + 1, 1) + o->extra;
        for (int64_t position = first; position <= last; position++, n++, start = 0) {
            int64_t sequence = o->document_index[position];
            if (sequence < 0 || sequence >= o->sequences.num_sequences) return BINIDX_BAD_DOCUMENT;
            int64_t stop = position < last ? load_i32(o->sequences.lengths, sequence) : end;
            spans[3 * n] = sequence;
            spans[3 * n + 1] = start;
            spans[3 * n + 2] = stop - start;
        }
    }
    return n;
}

/* Some at a time where there is room behind either side, so that short runs of any length take the same way. */
static void copy_documents(const binidx_orders *o, int64_t first, int64_t count, int32_t *out, int64_t room) {
    const int32_t *from = o->document_index + first;
    int64_t most = (room < o->num_documents - first ? room : o->num_documents - first), n = 0;
    for (; n < count && n + AT_ONCE <= most; n += AT_ONCE) memcpy(out + n, from + n, AT_ONCE * sizeof *from);
    for (; n < count; n++) out[n] = from[n];
}

void binidx_sample_ends(const binidx_orders *o, const int64_t *rows, int64_t num_samples, const int64_t *bounds,
                        int32_t *sequences, int32_t *starts, int32_t *stops) {
    int64_t total = bounds[num_samples];
    for (int64_t s = 0; s < num_samples; s++) {
        if (s + 2 * AHEAD < num_samples) prefetch_row(o, rows[s + 2 * AHEAD]);
        if (s + AHEAD < num_samples) __builtin_prefetch(o->document_index + row_value(o, rows[s + AHEAD], 0));
        copy_documents(o, row_value(o, rows[s], 0), bounds[s + 1] - bounds[s], sequences + bounds[s], total - bounds[s]);
        starts[s] = (int32_t)row_value(o, rows[s], 1);
        stops[s] = (int32_t)(row_value(o, rows[s] + 1, 1) + o->extra);
    }
}

int64_t binidx_locate_spans(const binidx_sequences *q, const int64_t *spans, int64_t num_spans, int64_t *ranges) {
    for (int64_t n = 0; n < num_spans; n++) {
        int64_t sequence = spans[3 * n], first = spans[3 * n + 1], count = spans[3 * n + 2];
        if (sequence < 0) sequence += q->num_sequences;
        if (sequence < 0 || sequence >= q->num_sequences) return n;
        int64_t length = load_i32(q->lengths, sequence);
        if (first < 0 || count < 0 || first > length || count > length - first) return n;
        ranges[2 * n] = load_i64(q->pointers, sequence) + first * q->item_bytes;
        ranges[2 * n + 1] = ranges[2 * n] + count * q->item_bytes;
    }
    return num_spans;
}
