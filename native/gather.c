/* gather.c: a micro-batch out of pieces of stored tokens, in one call.
 *
 *     pieces      |7 8 9|4 0|5 6 2 ...        anywhere in memory, of the stored dtype
 *     tokens       7 8 9 4 0 5 6 2            int64, S of them
 *     labels       8 9 4 0 5 6 2 .            the token after each; the extra token, or a pad, is the last
 *     loss mask    1 1 1 0 1 1 1 1            0 on an EOD, where asked, and where the label is a pad
 *     positions    0 1 2 3 4 5 6 7            from 0 again after each EOD, or in each piece, where that is asked
 *     cu_seqlens   0 3 5 8 8 8 8 8 8          where pieces start, for attention that stays within them; then S
 *     text         7 8 9 4 0 5 6 2 .          or this alone: int32, S + 1 of them
 *
 * Pads are written as token 0 at last, since no embedding has a row for them; those of `text` stay, as its reader masks
 * them. Each piece is read once, and all that follows from its tokens is written while they are in registers. While one
 * sample is copied, the pieces of the next are fetched: a sample begins 5 to 8 documents, each a miss of cache and TLB.
 *
 * Cost: 28 bytes written and 2 to 4 read a token. The bodies are plain C that the compiler makes vectors of, once for
 * each level. Source: Megatron Core, GPTDataset.__getitem__, whose samples these are; text is ours.
 */
#include "cpu.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE const char *piece_at(const binidx_gather *g, int64_t piece) {
    return (const char *)(uintptr_t)(g->base + g->ranges[2 * piece]);
}

INLINE int64_t piece_tokens(const binidx_gather *g, int64_t piece) {
    return (g->ranges[2 * piece + 1] - g->ranges[2 * piece]) / g->item_bytes;
}

static void prefetch_sample(const binidx_gather *g, int64_t sample) {
    if (sample >= g->num_samples) return;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        int64_t bytes = g->ranges[2 * piece + 1] - g->ranges[2 * piece];
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(piece_at(g, piece) + at);
    }
}

/* Stored tokens start where the .bin has them, at no alignment that C could count on: memcpy loads each. */
#define EACH_TOKEN(stored, body)                                                                                       \
    for (int64_t i = 0; i < count; i++) {                                                                              \
        stored token;                                                                                                  \
        memcpy(&token, from + i * (int64_t)sizeof token, sizeof token);                                                \
        body                                                                                                           \
    }                                                                                                                  \
    break;

/* The codes of an .idx. */
#define EACH_TOKEN_OF(dtype, body)                                                                                     \
    switch (dtype) {                                                                                                   \
    case 1: EACH_TOKEN(uint8_t, body)                                                                                  \
    case 2: EACH_TOKEN(int8_t, body)                                                                                   \
    case 3: EACH_TOKEN(int16_t, body)                                                                                  \
    case 4: EACH_TOKEN(int32_t, body)                                                                                  \
    case 5: EACH_TOKEN(int64_t, body)                                                                                  \
    case 6: EACH_TOKEN(double, body)                                                                                   \
    case 7: EACH_TOKEN(float, body)                                                                                    \
    case 8: EACH_TOKEN(uint16_t, body)                                                                                 \
    }

INLINE int64_t first_token(const char *from, int dtype) {
    int64_t first = 0, count = 1;
    EACH_TOKEN_OF(dtype, first = (int64_t)token;)
    return first;
}

/* A row of the outputs. */
typedef struct {
    int64_t *tokens, *labels, *positions;
    float *loss_mask;
    int64_t length, pads; /* pads: whether one was put */
} row;

/* `count` tokens that are both: labels of the token before, which there is, and tokens. */
INLINE int64_t put_inner(int64_t *restrict tokens, int64_t *restrict labels, float *restrict loss_mask,
                         const char *restrict from, int64_t count, int dtype, int64_t pad) {
    int64_t pads = 0;
    EACH_TOKEN_OF(dtype, {
        int64_t id = (int64_t)token;
        tokens[i] = id;
        labels[i] = id;
        loss_mask[i] = id != pad;
        pads |= id == pad;
    })
    return pads;
}

INLINE void put_label(row *r, int64_t at, int64_t id, int64_t pad) {
    r->labels[at] = id;
    r->loss_mask[at] = id != pad;
    r->pads |= id == pad;
}

/* Tokens number at, at + 1, ... of the sample: none beyond the extra one. */
INLINE void put_piece(row *r, const char *from, int64_t at, int64_t count, const binidx_gather *g) {
    int64_t end = at + count;
    if (count && at == 0) {
        r->tokens[0] = first_token(from, g->dtype);
        r->pads |= r->tokens[0] == g->pad;
        from += g->item_bytes, at++;
    }
    int64_t stop = end < r->length ? end : r->length;
    if (at < stop) {
        int64_t inner = stop - at, *labels = r->labels + at - 1;
        r->pads |= put_inner(r->tokens + at, labels, r->loss_mask + at - 1, from, inner, g->dtype, g->pad);
        from += inner * g->item_bytes, at = stop;
    }
    if (at < end) put_label(r, at - 1, first_token(from, g->dtype), g->pad);
}

/* The tokens of a sample with their labels and losses, pads at its end. */
INLINE void put_tokens(const binidx_gather *g, int64_t sample, row *r) {
    int64_t at = 0;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        int64_t count = piece_tokens(g, piece);
        put_piece(r, piece_at(g, piece), at, count, g);
        at += count;
    }
    for (; at <= r->length; at++) {
        if (at < r->length) r->tokens[at] = g->pad;
        if (at > 0) put_label(r, at - 1, g->pad, g->pad);
    }
}

INLINE void mask_eods(const row *r, int64_t eod) {
    const int64_t *restrict tokens = r->tokens;
    float *restrict loss_mask = r->loss_mask;
    for (int64_t i = 0; i < r->length; i++) loss_mask[i] = tokens[i] == eod ? 0 : loss_mask[i];
}

/* The last token of each piece that another follows: its label begins that one. */
INLINE void mask_ends(const binidx_gather *g, int64_t sample, const row *r) {
    int64_t at = 0;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        at += piece_tokens(g, piece);
        if (at > 0 && at <= r->length && piece + 1 < g->bounds[sample + 1]) r->loss_mask[at - 1] = 0;
    }
}

INLINE void count_up(int64_t *restrict positions, int64_t count) {
    for (int64_t i = 0; i < count; i++) positions[i] = i;
}

/* The first EOD at or after `at`, or the length; 32 tokens are compared at once. */
INLINE int64_t next_eod(const row *r, int64_t at, int64_t eod) {
    for (; at + 32 <= r->length; at += 32) {
        int64_t found = 0;
        for (int64_t i = 0; i < 32; i++) found |= r->tokens[at + i] == eod;
        if (found) break;
    }
    while (at < r->length && r->tokens[at] != eod) at++;
    return at;
}

INLINE void count_after_eods(const row *r, int64_t eod) {
    for (int64_t start = 0, stop; start < r->length; start = stop) {
        stop = next_eod(r, start, eod);
        stop += stop < r->length;
        count_up(r->positions + start, stop - start);
    }
}

INLINE int64_t tokens_of(const binidx_gather *g, int64_t sample) {
    int64_t tokens = 0;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) tokens += piece_tokens(g, piece);
    return tokens;
}

/* Megatron's rule, but of packed documents a last one of one token is the extra token only where the row is full: the
 * extra token does not count, the last piece has the pads, one without tokens is a bound said
 * twice, except at the end. Where that were more bounds than a row holds (Megatron fails there) these are left out. */
INLINE void count_in_pieces(const binidx_gather *g, int64_t sample, const row *r) {
    int32_t *bounds = g->cu_seqlens + g->rows[sample] * (r->length + 1), longest = 0;
    int64_t first = g->bounds[sample], last = g->bounds[sample + 1] - 1, start = 0, n = 0;
    if (g->extra && last >= first && piece_tokens(g, last) == 1 && (!g->mask_ends || tokens_of(g, sample) > r->length)) last--;
    int leave_out = last - first >= r->length;
    for (int64_t piece = first; start < r->length; piece++) {
        int64_t left = r->length - start, count = piece < last ? piece_tokens(g, piece) : left;
        if (count > left) count = left;
        if (count == 0 && leave_out) continue;
        bounds[n++] = (int32_t)start;
        count_up(r->positions + start, count);
        start += count;
        longest = count > longest ? (int32_t)count : longest;
    }
    for (; n <= r->length; n++) bounds[n] = (int32_t)r->length;
    g->max_seqlen[g->rows[sample]] = longest;
}

INLINE void put_positions(const binidx_gather *g, int64_t sample, const row *r) {
    if (g->starts == BINIDX_EACH_PIECE) count_in_pieces(g, sample, r);
    else if (g->starts == BINIDX_AFTER_EOD) count_after_eods(r, g->eod);
    else count_up(r->positions, r->length);
}

INLINE void hide_pads(int64_t *ids, int64_t count, int64_t pad) {
    for (int64_t i = 0; i < count; i++) ids[i] = ids[i] == pad ? 0 : ids[i];
}

INLINE void put_sample(const binidx_gather *g, int64_t sample) {
    int64_t first = g->rows[sample] * g->sequence_length;
    row r = {g->tokens + first, g->labels + first, g->positions + first, g->loss_mask + first, g->sequence_length, 0};
    put_tokens(g, sample, &r);
    if (g->mask_eod) mask_eods(&r, g->eod);
    if (g->mask_ends) mask_ends(g, sample, &r);
    put_positions(g, sample, &r);
    if (!r.pads) return;
    hide_pads(r.tokens, r.length, g->pad);
    hide_pads(r.labels, r.length, g->pad);
}

INLINE void put_plain(int32_t *restrict to, const char *restrict from, int64_t count, int dtype) {
    EACH_TOKEN_OF(dtype, to[i] = (int32_t)token;)
}

INLINE void put_text(const binidx_gather *g, int64_t sample) {
    int64_t length = g->sequence_length + 1, at = 0;
    int32_t *text = g->text + g->rows[sample] * length;
    for (int64_t piece = g->bounds[sample]; piece < g->bounds[sample + 1]; piece++) {
        put_plain(text + at, piece_at(g, piece), piece_tokens(g, piece), g->dtype);
        at += piece_tokens(g, piece);
    }
    for (; at < length; at++) text[at] = (int32_t)g->pad;
}

/* Whether every number leads where it should: bounds rise, rows exist, no sample is longer than a row and its extra token. */
static int64_t check_samples(const binidx_gather *g) {
    if (g->bounds[0] != 0 || g->bounds[g->num_samples] != g->num_pieces) return BINIDX_BAD_DOCUMENT;
    for (int64_t sample = 0; sample < g->num_samples; sample++) {
        int64_t tokens = 0, stop = g->bounds[sample + 1];
        if (stop < g->bounds[sample] || stop > g->num_pieces) return BINIDX_BAD_DOCUMENT;
        if (g->rows[sample] < 0 || g->rows[sample] >= g->num_rows) return BINIDX_BAD_DOCUMENT;
        for (int64_t piece = g->bounds[sample]; piece < stop; piece++) {
            int64_t bytes = g->ranges[2 * piece + 1] - g->ranges[2 * piece];
            if (bytes < 0 || bytes % g->item_bytes) return BINIDX_BAD_LENGTH;
            tokens += bytes / g->item_bytes;
        }
        if (tokens > g->sequence_length + g->extra) return BINIDX_BAD_TOKENS;
    }
    return g->num_samples;
}

INLINE void gather(const binidx_gather *g) {
    prefetch_sample(g, 0);
    for (int64_t sample = 0; sample < g->num_samples; sample++) {
        prefetch_sample(g, sample + 1);
        if (g->text) put_text(g, sample);
        else put_sample(g, sample);
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
