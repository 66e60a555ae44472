/* fuzz_rows.h: rows of a micro-batch for fuzz targets, and what must stand in them, token by token. */
#ifndef BINIDX_FUZZ_ROWS_H
#define BINIDX_FUZZ_ROWS_H
#include "binidx.h"
#include "fuzz.h"

enum { PAD = 7, EOD = 9, ROWS = 4 };

static inline void make_rows(binidx_gather *g, int text) {
    int64_t cells = ROWS * g->sequence_length;
    g->tokens = g->labels = g->positions = NULL, g->loss_mask = NULL, g->cu_seqlens = g->max_seqlen = g->text = NULL;
    if (text) {
        g->text = bytes_of(4 * (cells + ROWS));
        return;
    }
    g->tokens = bytes_of(8 * cells), g->labels = bytes_of(8 * cells), g->loss_mask = bytes_of(4 * cells);
    g->positions = bytes_of(8 * cells);
    if (g->starts != BINIDX_EACH_PIECE) return;
    g->cu_seqlens = bytes_of(4 * (cells + ROWS)), g->max_seqlen = bytes_of(4 * ROWS);
}

static inline void free_rows(binidx_gather *g) {
    free(g->tokens), free(g->labels), free(g->positions), free(g->loss_mask);
    free(g->cu_seqlens), free(g->max_seqlen), free(g->text);
}

static inline void note_rows(const binidx_gather *g) {
    int64_t cells = ROWS * g->sequence_length;
    if (g->text) note(g->text, 4 * (cells + ROWS));
    else note(g->tokens, 8 * cells), note(g->labels, 8 * cells), note(g->loss_mask, 4 * cells), note(g->positions, 8 * cells);
}

static inline int64_t stored_token(const binidx_gather *g, const uint8_t *at) {
    int16_t i16;
    uint16_t u16;
    memcpy(&i16, at, g->item_bytes == 2 ? 2 : 1);
    memcpy(&u16, at, g->item_bytes == 2 ? 2 : 1);
    return g->dtype == 1 ? *at : g->dtype == 2 ? (int8_t)*at : g->dtype == 3 ? i16 : u16;
}

static inline int64_t tokens_of(const binidx_gather *g, int64_t piece) {
    return (g->ranges[2 * piece + 1] - g->ranges[2 * piece]) / g->item_bytes;
}

/* Token number t of a sample, PAD past its end. */
static inline int64_t text_at(const binidx_gather *g, int64_t sample, int64_t t) {
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        if (t < tokens_of(g, piece))
            return stored_token(g, (const uint8_t *)(uintptr_t)(g->base + g->ranges[2 * piece]) + t * g->item_bytes);
        t -= tokens_of(g, piece);
    }
    return PAD;
}

/* Megatron's rule as it is said there: lengths of documents, less the extra token, the rest to the last one. */
static inline void check_pieces(const binidx_gather *g, int64_t sample) {
    int64_t n = g->bounds[sample + 1] - g->bounds[sample], left = g->sequence_length, k = 0, at = 0, longest = 0;
    if (n && g->extra && tokens_of(g, g->bounds[sample + 1] - 1) == 0) return; /* the extra token is in the last one */
    int64_t *lengths = bytes_of(8 * (n + 1));
    for (int64_t i = 0; i < n; i++) lengths[i] = tokens_of(g, g->bounds[sample] + i);
    if (n && g->extra && --lengths[n - 1] == 0) n--;
    for (int64_t i = 0; i < n; i++) left -= lengths[i];
    if (left > 0 && n == 0) lengths[n++] = 0;
    lengths[n - 1] += left;
    const int32_t *bounds = g->cu_seqlens + g->rows[sample] * (g->sequence_length + 1);
    for (int64_t i = 0; i < n; i++) {
        if (lengths[i] == 0 && n > g->sequence_length) continue;
        if (at < g->sequence_length) same(bounds[k++] == at);
        const int64_t *positions = g->positions + g->rows[sample] * g->sequence_length + at;
        for (int64_t t = 0; t < lengths[i]; t++) same(positions[t] == t);
        at += lengths[i];
        longest = lengths[i] > longest ? lengths[i] : longest;
    }
    for (; k <= g->sequence_length; k++) same(bounds[k] == g->sequence_length);
    same(g->max_seqlen[g->rows[sample]] == longest);
    free(lengths);
}

static inline void check_row(const binidx_gather *g, int64_t sample) {
    int64_t first = g->rows[sample] * g->sequence_length, start = 0;
    for (int64_t later = sample + 1; later < g->num_samples; later++)
        if (g->rows[later] == g->rows[sample]) return; /* written over */
    for (int64_t t = 0; g->text && t <= g->sequence_length; t++)
        same(g->text[first + g->rows[sample] + t] == text_at(g, sample, t));
    for (int64_t t = 0; g->tokens && t < g->sequence_length; t++) {
        int64_t token = text_at(g, sample, t), label = text_at(g, sample, t + 1);
        same(g->tokens[first + t] == (token == PAD ? 0 : token));
        same(g->labels[first + t] == (label == PAD ? 0 : label));
        same(g->loss_mask[first + t] == (float)(label != PAD && !(g->mask_eod && token == EOD)));
        if (g->starts != BINIDX_EACH_PIECE) same(g->positions[first + t] == t - start);
        if (g->starts == BINIDX_AFTER_EOD && token == EOD) start = t + 1;
    }
    if (g->cu_seqlens) check_pieces(g, sample);
}

/* All samples, or that nothing was written. */
static inline void check_rows(const binidx_gather *g, int written) {
    for (int64_t sample = 0; written && sample < g->num_samples; sample++) check_row(g, sample);
    if (written) return;
    if (g->text) same(g->text[0] == (int32_t)0xa5a5a5a5u);
    else same(g->tokens[0] == (int64_t)0xa5a5a5a5a5a5a5a5ull);
}

#endif
