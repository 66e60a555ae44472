/* gather.c: a micro-batch out of pieces of stored tokens, in one call.
 *
 *     pieces      |7 8 9|4 0|5 6 2 ...        anywhere in memory, of the stored dtype
 *     tokens       7 8 9 4 0 5 6 2            int64, S of them
 *     labels       8 9 4 0 5 6 2 .            the token after each; the extra token, or a pad, is the last
 *     positions    0 1 2 3 4 0 1 2            from 0 again after each EOD, where that is asked
 *     loss mask    1 1 1 0 1 1 1 1            0 on an EOD, where asked, and where the label is a pad
 *
 * Pads are written as token 0 at last, since no embedding has a row for them. Each piece is read once and
 * widened; the passes after that run over 32 KiB that are still near. While one sample is copied, the pieces of the
 * next are fetched: a sample begins 5 to 8 documents, each a miss of cache and TLB.
 *
 * Cost: 28 bytes written and 2 to 4 read a token, 4 to 5 us for 4,096 tokens. The bodies are plain C that the compiler
 * makes vectors of, once for each level. Source: Megatron Core, GPTDataset.__getitem__, whose samples these are.
 */
#include "cpu.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE const void *piece_at(const binidx_gather *g, int64_t piece) {
    return (const void *)(uintptr_t)(g->base + g->ranges[2 * piece]);
}

INLINE int64_t piece_bytes(const binidx_gather *g, int64_t piece) {
    return g->ranges[2 * piece + 1] - g->ranges[2 * piece];
}

static void prefetch_sample(const binidx_gather *g, int64_t sample) {
    if (sample >= g->num_samples) return;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++)
        for (int line = 0; line < 4; line++) __builtin_prefetch((const char *)piece_at(g, piece) + 64 * line);
}

/* Stored tokens start where the .bin has them, at no alignment that C could count on: memcpy loads each. */
#define WIDEN(stored)                                                                                                  \
    for (int64_t i = 0; i < count; i++) {                                                                              \
        stored token;                                                                                                  \
        memcpy(&token, (const char *)from + i * (int64_t)sizeof token, sizeof token);                                  \
        to[i] = (int64_t)token;                                                                                        \
    }                                                                                                                  \
    break;

INLINE void widen(int64_t *restrict to, const void *restrict from, int64_t count, int dtype) {
    switch (dtype) { /* the codes of an .idx */
    case 1: WIDEN(uint8_t)
    case 2: WIDEN(int8_t)
    case 3: WIDEN(int16_t)
    case 4: WIDEN(int32_t)
    case 5: WIDEN(int64_t)
    case 6: WIDEN(double)
    case 7: WIDEN(float)
    case 8: WIDEN(uint16_t)
    }
}

/* The text of a sample, S + extra tokens with pads at its end: S of them to tokens, all but the first to labels. */
INLINE void put_text(const binidx_gather *g, int64_t sample, int64_t *tokens, int64_t *labels) {
    int64_t length = g->sequence_length, filled = 0;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        const char *stored = piece_at(g, piece);
        int64_t room = filled < length ? length - filled : 0, count = piece_bytes(g, piece) / g->item_bytes;
        int64_t whole = count < room ? count : room;
        widen(tokens + filled, stored, whole, g->dtype);
        if (count > whole) widen(labels + length - 1, stored + whole * g->item_bytes, 1, g->dtype);
        filled += count;
    }
    int64_t end = filled < length ? filled : length;
    for (int64_t i = end; i < length; i++) tokens[i] = g->pad;
    memcpy(labels, tokens + 1, (size_t)(length - 1) * sizeof *labels);
    if (filled <= length) labels[length - 1] = g->pad;
}

/* Returns whether there is a pad among the labels. */
INLINE int put_loss_mask(const binidx_gather *g, const int64_t *tokens, const int64_t *labels, float *loss_mask) {
    int64_t pad = g->pad, eod = g->eod, pads = 0;
    for (int64_t i = 0; i < g->sequence_length; i++) {
        pads |= labels[i] == pad;
        loss_mask[i] = labels[i] != pad;
    }
    if (g->mask_eod)
        for (int64_t i = 0; i < g->sequence_length; i++) loss_mask[i] = tokens[i] == eod ? 0 : loss_mask[i];
    return pads != 0;
}

INLINE void put_positions(const binidx_gather *g, const int64_t *tokens, int64_t *positions) {
    for (int64_t i = 0, start = 0; i < g->sequence_length; i++) {
        positions[i] = i - start;
        start = tokens[i] == g->eod ? i + 1 : start;
    }
}

INLINE void hide_pads(int64_t *ids, int64_t count, int64_t pad) {
    for (int64_t i = 0; i < count; i++) ids[i] = ids[i] == pad ? 0 : ids[i];
}

/* Whether every number leads where it should: bounds rise, rows exist, no sample is longer than a row and a token. */
static int64_t check_samples(const binidx_gather *g) {
    if (g->bounds[0] != 0 || g->bounds[g->num_samples] != g->num_pieces) return BINIDX_BAD_DOCUMENT;
    for (int64_t sample = 0; sample < g->num_samples; sample++) {
        int64_t tokens = 0, stop = g->bounds[sample + 1];
        if (stop < g->bounds[sample] || stop > g->num_pieces) return BINIDX_BAD_DOCUMENT;
        if (g->rows[sample] < 0 || g->rows[sample] >= g->num_rows) return BINIDX_BAD_DOCUMENT;
        for (int64_t piece = g->bounds[sample]; piece < stop; piece++) {
            if (piece_bytes(g, piece) < 0 || piece_bytes(g, piece) % g->item_bytes) return BINIDX_BAD_LENGTH;
            tokens += piece_bytes(g, piece) / g->item_bytes;
        }
        if (tokens > g->sequence_length + 1) return BINIDX_BAD_TOKENS;
    }
    return g->num_samples;
}

INLINE void gather(const binidx_gather *g) {
    prefetch_sample(g, 0);
    for (int64_t sample = 0; sample < g->num_samples; sample++) {
        int64_t length = g->sequence_length, first = g->rows[sample] * length;
        int64_t *tokens = g->tokens + first, *labels = g->labels + first;
        prefetch_sample(g, sample + 1);
        put_text(g, sample, tokens, labels);
        int pads = put_loss_mask(g, tokens, labels, g->loss_mask + first);
        if (g->positions) put_positions(g, tokens, g->positions + first);
        if (!pads && tokens[0] != g->pad) continue; /* the other tokens are labels too */
        hide_pads(tokens, length, g->pad);
        hide_pads(labels, length, g->pad);
    }
}

#if BINIDX_X86
BINIDX_TARGET_AVX2 static void gather_avx2(const binidx_gather *g) { gather(g); }
BINIDX_TARGET_AVX512 static void gather_avx512(const binidx_gather *g) { gather(g); }
#endif

int64_t binidx_gather_samples(const binidx_gather *g, int level) {
    int64_t checked = check_samples(g);
    if (checked < 0) return checked;
#if BINIDX_X86
    if (level == BINIDX_AVX512) return gather_avx512(g), checked;
    if (level == BINIDX_AVX2) return gather_avx2(g), checked;
#endif
    (void)level;
    return gather(g), checked;
}
