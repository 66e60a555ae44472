/* scan_tokens.c: the documents of a .bin in which patterns stand, in their text or in their tokens.
 *
 *     tokens     .. 464 2330 | 22746 13 50256 ..      read in pieces; documents go on from one into the next
 *     table      id ─► bytes                          none: the bytes of the tokens are what is searched
 *     text       [held][ piece decoded ..........]    held: the end of the piece before, shorter than the longest pattern
 *     folded     the same, of folded tokens           the few that end within a character go through fold_text.c
 *     hits       (document, pattern, matches, first byte in its text)
 *
 * The text of a document is searched by itself, so that nothing is found over its ends.
 *
 * Cost: 2 ns a token to decode, 16 bytes at a time, and the search of its bytes (find_patterns.c). Source: us.
 */
#include "binidx.h"
#include <string.h>

enum { AT_ONCE = 16 };

static inline uint64_t token_at(const void *tokens, int64_t i, int64_t item_bytes) {
    uint64_t token = 0;
    memcpy(&token, (const char *)tokens + i * item_bytes, (size_t)item_bytes);
    return token;
}

/* Tokens from *first on as text behind `at`, as many as there is room for; where the text ends, or BINIDX_BAD_ID. */
static inline int64_t decode(const binidx_scan *s, const void *tokens, int64_t *first, int64_t stop, int64_t at,
                             int64_t item_bytes) {
    int64_t most = s->room - s->longest_token - AT_ONCE, i = *first;
    for (; i < stop && at <= most; i++) {
        uint64_t id = token_at(tokens, i, item_bytes);
        if (id >= (uint64_t)s->vocab_size) return *first = i, BINIDX_BAD_ID;
        int64_t from = s->offsets[id], length = s->offsets[id + 1] - from;
        memcpy(s->text + at, s->bytes + from, AT_ONCE);
        if (length > AT_ONCE) memcpy(s->text + at + AT_ONCE, s->bytes + from + AT_ONCE, (size_t)(length - AT_ONCE));
        at += length;
    }
    return *first = i, at;
}

/* As decode, but folded: a token by itself unless it ends, or the one before it ended, within a character. */
static inline int64_t decode_folded(const binidx_scan *s, const void *tokens, int64_t *first, int64_t stop, int64_t at,
                                    int64_t item_bytes) {
    int64_t most = s->room - s->longest_token - AT_ONCE, i = *first, blank = s->folding->blank;
    for (; i < stop && at <= most; i++) {
        uint64_t id = token_at(tokens, i, item_bytes);
        if (id >= (uint64_t)s->vocab_size) return *first = i, BINIDX_BAD_ID;
        int64_t kind = s->kinds[id];
        if ((kind & 8) | s->folding->num_part) {
            s->folding->blank = blank;
            at += binidx_fold_text(s->folding, s->bytes + s->offsets[id], s->offsets[id + 1] - s->offsets[id], s->text + at, NULL);
            blank = s->folding->blank;
            continue;
        }
        int64_t from = s->folded_offsets[id] + (blank & kind), length = s->folded_offsets[id + 1] - from;
        memcpy(s->text + at, s->folded + from, AT_ONCE);
        if (length > AT_ONCE) memcpy(s->text + at + AT_ONCE, s->folded + from + AT_ONCE, (size_t)(length - AT_ONCE));
        at += length, blank = (kind >> 1 | (blank & kind >> 2)) & 1;
    }
    s->folding->blank = blank;
    return *first = i, at;
}

static int64_t fill(const binidx_scan *s, const void *tokens, int64_t *first, int64_t stop, int64_t at) {
    if (s->folding) {
        if (s->item_bytes == 2) return decode_folded(s, tokens, first, stop, at, 2);
        if (s->item_bytes == 4) return decode_folded(s, tokens, first, stop, at, 4);
        return decode_folded(s, tokens, first, stop, at, s->item_bytes);
    }
    if (s->bytes) {
        if (s->item_bytes == 2) return decode(s, tokens, first, stop, at, 2);
        if (s->item_bytes == 4) return decode(s, tokens, first, stop, at, 4);
        return decode(s, tokens, first, stop, at, s->item_bytes);
    }
    int64_t room = (s->room - at) / s->item_bytes, count = stop - *first < room ? stop - *first : room;
    memcpy(s->text + at, (const char *)tokens + *first * s->item_bytes, (size_t)(count * s->item_bytes));
    return *first += count, at + count * s->item_bytes;
}

static void note_hit(binidx_scan *s, int64_t document, int64_t pattern, int64_t at) {
    int64_t row = s->rows[pattern];
    if (row >= 0 && row < s->num_hits && s->hits[4 * row] == document && s->hits[4 * row + 1] == pattern) {
        s->hits[4 * row + 2]++;
        return;
    }
    int64_t hit[] = {document, pattern, 1, at};
    s->rows[pattern] = s->num_hits;
    memcpy(s->hits + 4 * s->num_hits++, hit, sizeof hit);
}

/* Matches in the first `size` bytes of text, but for those within the held ones, which are counted already. */
static void search(binidx_scan *s, int64_t size, int64_t document) {
    const binidx_patterns *p = s->patterns;
    int64_t pattern = -1;
    for (int64_t at = p->window; (at = binidx_next_window(p, s->text, size, at, &pattern)) <= size; at += p->unit) {
        for (int64_t start = at - p->window; pattern >= 0; pattern = p->next[pattern]) {
            int64_t length = p->bounds[pattern + 1] - p->bounds[pattern];
            if (length <= size - start && start + length > s->held &&
                !memcmp(s->text + start, p->bytes + p->bounds[pattern], (size_t)length))
                note_hit(s, document, pattern, s->before + start);
        }
    }
}

static int64_t scan_piece(binidx_scan *s, const void *tokens, int64_t first, int64_t stop, int64_t document, int open) {
    while (first < stop) {
        int64_t size = fill(s, tokens, &first, stop, s->held);
        if (size < 0) {
            if (s->folding) s->folding->num_part = s->folding->blank = 0;
            return s->bad_token = first, size;
        }
        search(s, size, document);
        if (first == stop && !open) break;
        int64_t tail = s->patterns->longest - s->patterns->unit, held = size < tail ? size : tail;
        memmove(s->text, s->text + size - held, (size_t)held);
        s->before += size - held, s->held = held;
    }
    if (!open) s->held = s->before = 0;
    if (!open && s->folding) s->folding->num_part = s->folding->blank = 0; /* what is left of a character would be a blank */
    return 0;
}

int64_t binidx_scan_documents(binidx_scan *s, const void *tokens, const int64_t *bounds, int64_t count, int open) {
    for (int64_t d = 0; d < count; d++) {
        if (s->room_hits - s->num_hits < s->patterns->num_patterns) return d;
        int64_t code = scan_piece(s, tokens, bounds[d], bounds[d + 1], d, open && d == count - 1);
        if (code < 0) return code;
    }
    return count;
}
