/* sample_index.c: where each sample starts in the stream of shuffled documents.
 *
 *     documents    0       1                    3             document 2 has no tokens
 *     tokens       0  1  2 3  4  5  6  7  8  9  10 11 12 13
 *     samples      [0          ]
 *     of 4 tokens             [1          ]
 *     + 1 extra                           [2           ]
 *     rows         (0,0)      (1,1)       (1,5)       (3,2)
 *
 * Row j is the document that holds the last token of sample j-1, and the offset in it at which sample j starts:
 * the last token is number j*S + extra - 1, and its offset, plus one, minus extra, is that start. So a document decides
 * its rows by the tokens before it alone: one loop does all, or parts of the documents are first summed, then each part
 * writes its own rows, in any order. A last sample cut short ends with the stream.
 *
 * Cost: a gather from sequence_lengths for each document, 2 to 3 ns at 10^8; the rows hide behind its cache misses.
 * Source: Megatron Core, build_sample_idx, whose rows these are; where it reads past its arrays or stores an offset of
 * -1 we return an error or the right row.
 */
#include "sample_rows.h"

enum { AHEAD = 128 };

static inline int64_t load_length(const binidx_samples *s, int64_t position) {
    return load_i32(s->sequence_lengths, s->document_index[position]);
}

/* The length of the document at this position, or what is wrong with it. The line of a later one is asked for: its
 * address is a number, since the document may not be there. */
static inline int64_t next_length(const binidx_samples *s, int64_t position) {
    int64_t later = position + AHEAD < s->num_documents ? position + AHEAD : position;
    __builtin_prefetch((const void *)((uintptr_t)s->sequence_lengths + 4 * (uintptr_t)s->document_index[later]));
    int64_t sequence = s->document_index[position];
    if (sequence < 0 || sequence >= s->num_sequences) return BINIDX_BAD_DOCUMENT;
    int64_t length = load_i32(s->sequence_lengths, sequence);
    return length < 0 ? BINIDX_BAD_LENGTH : length;
}

int64_t binidx_gather_lengths(const binidx_samples *s, int64_t first, int64_t count, int32_t *lengths, int64_t *found) {
    int64_t tokens = 0;
    for (int64_t k = 0; k < count; k++) {
        int64_t length = next_length(s, first + k);
        if (length < 0) return *found = first + k, length;
        if (lengths) lengths[k] = (int32_t)length;
        tokens += length;
    }
    return tokens;
}

static inline int64_t sample_end(const binidx_samples *s, void *rows, int wide) {
    int64_t missing = s->num_samples - (first_row_from(s, s->num_tokens) - 1);
    if (missing < 1) return 0;
    if (missing > 1 || s->num_tokens <= s->extra) return BINIDX_BAD_TOKENS;
    int64_t position = s->num_documents - 1; /* the last document, or the last that can hold the extra token */
    while (position >= 0 && load_length(s, position) < s->extra) position--;
    if (position < 0) return BINIDX_BAD_TOKENS;
    put_row(rows, wide, s->num_samples, position, load_length(s, position) - s->extra);
    return 0;
}

static inline void sample_rows(const binidx_samples *s, const int32_t *lengths, int64_t first, int64_t count,
                               int64_t token, int64_t num_tokens, void *rows, int wide) {
    int64_t stop = first_row_from(s, token + num_tokens), end = s->num_samples + 1;
    row_cursor cursor = start_rows(s, rows, token, stop < end ? stop : end);
    if (first == 0) put_row(rows, wide, 0, 0, 0);
    for (int64_t k = 0; k < count && cursor.row < cursor.stop; k++) put_document(&cursor, wide, first + k, lengths[k]);
}

static inline int64_t sample_index(const binidx_samples *s, void *rows, int wide, int64_t *found) {
    row_cursor cursor = start_rows(s, rows, 0, s->num_samples + 1);
    int64_t position = 0, tokens = 0;
    put_row(rows, wide, 0, 0, 0);
    for (; position < s->num_documents && cursor.row < cursor.stop; position++) {
        int64_t length = next_length(s, position);
        if (length < 0) return *found = position, length;
        put_document(&cursor, wide, position, length);
        tokens += length;
    }
    int64_t behind = binidx_gather_lengths(s, position, s->num_documents - position, NULL, found);
    if (behind < 0) return behind;
    *found = tokens + behind;
    if (*found != s->num_tokens || sample_end(s, rows, wide) < 0) return BINIDX_BAD_TOKENS;
    return s->num_samples + 1;
}

int64_t binidx_sample_index_4(const binidx_samples *samples, int32_t *rows, int64_t *found) {
    return sample_index(samples, rows, 0, found);
}

int64_t binidx_sample_index_8(const binidx_samples *samples, int64_t *rows, int64_t *found) {
    return sample_index(samples, rows, 1, found);
}

void binidx_sample_rows_4(const binidx_samples *samples, const int32_t *lengths, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int32_t *rows) {
    sample_rows(samples, lengths, first, count, token, num_tokens, rows, 0);
}

void binidx_sample_rows_8(const binidx_samples *samples, const int32_t *lengths, int64_t first, int64_t count,
                          int64_t token, int64_t num_tokens, int64_t *rows) {
    sample_rows(samples, lengths, first, count, token, num_tokens, rows, 1);
}

int64_t binidx_sample_end_4(const binidx_samples *samples, int32_t *rows) { return sample_end(samples, rows, 0); }

int64_t binidx_sample_end_8(const binidx_samples *samples, int64_t *rows) { return sample_end(samples, rows, 1); }
