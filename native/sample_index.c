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
 * the last token is number j*S + extra - 1, and its offset, plus one, minus extra, is that start. One loop over the
 * documents keeps how far that token is from the start of the document. A last sample cut short ends with the stream.
 *
 * Cost: 4 ns a document at 10^7, a gather from sequence_lengths each. Source: Megatron Core, build_sample_idx, whose rows
 * these are; where it reads past its arrays or stores an offset of -1 we return an error or the right row.
 */
#include "binidx.h"

#include <string.h>

enum { AHEAD = 128 };

static inline const char *length_at(const binidx_samples *s, int64_t sequence) {
    return (const char *)s->sequence_lengths + 4 * sequence;
}

static inline int64_t load_length(const binidx_samples *s, int64_t position) {
    int32_t length;
    memcpy(&length, length_at(s, s->document_index[position]), 4);
    return length;
}

/* 0, or what is wrong with the document at this position. */
static inline int64_t check_document(const binidx_samples *s, int64_t position) {
    int64_t sequence = s->document_index[position];
    if (sequence < 0 || sequence >= s->num_sequences) return BINIDX_BAD_DOCUMENT;
    return load_length(s, position) < 0 ? BINIDX_BAD_LENGTH : 0;
}

static inline void prefetch_length(const binidx_samples *s, int64_t position) {
    if (position >= s->num_documents) return;
    int64_t sequence = s->document_index[position];
    if (sequence >= 0 && sequence < s->num_sequences) __builtin_prefetch(length_at(s, sequence));
}

/* `wide` is a constant in both callers: the compiler makes one function for each kind of row. */
static inline void put(void *rows, int wide, int64_t row, int64_t position, int64_t offset) {
    if (wide) {
        ((int64_t *)rows)[2 * row] = position;
        ((int64_t *)rows)[2 * row + 1] = offset;
    } else {
        ((int32_t *)rows)[2 * row] = (int32_t)position;
        ((int32_t *)rows)[2 * row + 1] = (int32_t)offset;
    }
}

/* The end of a last sample cut short: the end of the last document, or of the last that can hold the extra token. */
static void put_end(const binidx_samples *s, void *rows, int wide) {
    int64_t position = s->num_documents - 1;
    while (load_length(s, position) < s->extra) position--;
    put(rows, wide, s->num_samples, position, load_length(s, position) - s->extra);
}

static inline int64_t sample_index(const binidx_samples *s, void *rows, int wide, int64_t *found) {
    int64_t row = 1, tokens = 0, rest = s->sequence_length + s->extra - 1; /* from this document to the sample's last token */
    put(rows, wide, 0, 0, 0);
    for (int64_t position = 0; position < s->num_documents; position++) {
        prefetch_length(s, position + AHEAD);
        int64_t error = check_document(s, position);
        if (error) return *found = position, error;
        int64_t length = load_length(s, position);
        for (; rest < length && row <= s->num_samples; row++, rest += s->sequence_length)
            put(rows, wide, row, position, rest + 1 - s->extra);
        rest -= length;
        tokens += length;
    }
    *found = tokens;
    int64_t missing = s->num_samples + 1 - row;
    if (tokens != s->num_tokens || missing > 1 || (missing == 1 && tokens <= s->extra)) return BINIDX_BAD_TOKENS;
    if (missing == 1) put_end(s, rows, wide);
    return s->num_samples + 1;
}

int64_t binidx_sample_index_4(const binidx_samples *samples, int32_t *rows, int64_t *found) {
    return sample_index(samples, rows, 0, found);
}

int64_t binidx_sample_index_8(const binidx_samples *samples, int64_t *rows, int64_t *found) {
    return sample_index(samples, rows, 1, found);
}
