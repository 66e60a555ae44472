/* fold_text.c: a text as a search compares it: each character replaced by what it folds to, and one blank for a run of them.
 *
 *     text       "Caf\xc3" | "\xa9,  THE\xff"    in pieces that may end within a character
 *     part            [c3] ─► U+00E9             the bytes of that character so far
 *     folds      'C' ─► "c", U+00E9 ─► "e" U+0301, ',' ─► " ", U+00AD ─► ""          others stay
 *     folded     "cafe" U+0301 " the "           a byte that begins no character is a blank
 *
 * Cost: 5 ns a byte; a search folds the tokens of a table once, and only those that end within a character here.
 * Source: us; the table is made by search/normalize.py.
 */
#include "binidx.h"
#include <string.h>

enum { UNFINISHED = -1, INVALID = -2 };

/* The code point of the bytes; UNFINISHED: more are needed; INVALID: the first begins no character. */
static inline int64_t character(const uint8_t *part, int64_t size) {
    static const int64_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    int64_t needed = part[0] < 0x80 ? 1 : part[0] < 0xc0 ? 0 : part[0] < 0xe0 ? 2 : part[0] < 0xf0 ? 3 : part[0] < 0xf8 ? 4 : 0;
    if (!needed) return INVALID;
    int64_t code = needed == 1 ? part[0] : part[0] & 0x7f >> needed;
    for (int64_t i = 1; i < size; i++) {
        if ((part[i] & 0xc0) != 0x80) return INVALID;
        code = code << 6 | (part[i] & 0x3f);
    }
    if (size < needed) return UNFINISHED;
    return code < least[needed] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? INVALID : code;
}

int64_t binidx_fold_text(binidx_folding *f, const uint8_t *text, int64_t size, uint8_t *folded, int64_t *origins) {
    int64_t at = 0;
    for (int64_t i = 0; i < size; i++) {
        f->part[f->num_part++] = text[i];
        for (int64_t code; f->num_part && (code = character(f->part, f->num_part)) != UNFINISHED;) {
            int64_t origin = i + 1 - f->num_part, used = code < 0 ? 1 : f->num_part, length = used, fold = -1;
            const uint8_t *from = code < 0 ? (const uint8_t *)" " : f->part;
            if (code >= 0) fold = f->folds[256 * (int64_t)f->pages[code >> 8] + (code & 255)];
            if (fold >= 0) length = f->bytes[fold], from = f->bytes + fold + 1;
            for (int64_t b = 0; b < length; b++) {
                if (from[b] == ' ' && f->blank) continue;
                f->blank = from[b] == ' ';
                if (origins) origins[at] = origin;
                if (folded) folded[at] = from[b];
                at++;
            }
            if ((f->num_part -= used)) memmove(f->part, f->part + used, (size_t)f->num_part);
        }
    }
    return at;
}
