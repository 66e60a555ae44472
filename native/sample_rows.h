/* sample_rows.h: the rows of one document after another, inlined into the loops that know the lengths (C only). */
#ifndef BINIDX_SAMPLE_ROWS_H
#define BINIDX_SAMPLE_ROWS_H
#include "binidx.h"
#include "unaligned.h"

/* Where the next row goes, and how far the token is that decides it. */
typedef struct {
    void *rows;
    int64_t row, stop; /* the next row, and the first that is not to be written */
    int64_t away;      /* tokens from the start of the current document to the last token of sample row - 1 */
    int64_t sequence_length, extra;
} row_cursor;

/* The first row decided by a token from this one on: ceil((token + 1 - extra) / sequence_length), at least 1. */
static inline int64_t first_row_from(const binidx_samples *s, int64_t token) {
    int64_t tokens = token + 1 - s->extra;
    return tokens <= 1 ? 1 : (tokens - 1) / s->sequence_length + 1;
}

/* The rows before `stop`, from a document on that `token` tokens stand before. */
static inline row_cursor start_rows(const binidx_samples *s, void *rows, int64_t token, int64_t stop) {
    int64_t row = first_row_from(s, token), last = row * s->sequence_length + s->extra - 1;
    return (row_cursor){rows, row, stop, last - token, s->sequence_length, s->extra};
}

/* `wide` is a constant in all callers: the compiler makes one function for each kind of row. */
static inline void put_row(void *rows, int wide, int64_t row, int64_t position, int64_t offset) {
    if (wide) {
        ((int64_t *)rows)[2 * row] = position;
        ((int64_t *)rows)[2 * row + 1] = offset;
    } else {
        ((int32_t *)rows)[2 * row] = (int32_t)position;
        ((int32_t *)rows)[2 * row + 1] = (int32_t)offset;
    }
}

static inline void put_next(const row_cursor *c, int wide, int64_t position, int64_t away) {
    put_row(c->rows, wide, c->row, position, away + 1 - c->extra);
}

/* `yes ? one : none` without a branch, also where one follows that hangs on the result. */
static inline int64_t chosen(int yes, int64_t one, int64_t none) {
    int64_t either = yes ? one : none;
    __asm__("" : "+r"(either));
    return either;
}

/* The rows that this document decides; needs row < stop. The first is written whether it is one or not, and stays if it
 * is: a branch would be mispredicted at every sample. What is away after it is computed for both, so that one document
 * waits two cycles for the one before it. */
static inline void put_document(row_cursor *c, int wide, int64_t position, int64_t length) {
    int64_t none = c->away - length, one = c->away + (c->sequence_length - length);
    put_next(c, wide, position, c->away);
    c->row += none < 0;
    c->away = chosen(none < 0, one, none);
    for (; c->away < 0 && c->row < c->stop; c->row++, c->away += c->sequence_length)
        put_next(c, wide, position, c->away + length);
}

#endif
