/* fuzz_fold_text.c: a text folded in pieces, against a look at each of its bytes for the character that begins there.
 *
 * Input: cuts 2, then the bytes of the text. Of the code points, every seventh becomes blanks and letters, every fifth
 * nothing.
 */
#include "binidx.h"
#include "fuzz.h"

enum { ROWS = 2, LONGEST = 4 };

/* Bytes of the character that begins at text[at], by the table of well-formed UTF-8 (Unicode, table 3-7); 0: none does. */
static int64_t length_at(const uint8_t *text, int64_t size, int64_t at) {
    static const uint8_t forms[][4] = { /* first byte, second byte: from and to */
        {0x00, 0x7f, 0, 0}, {0xc2, 0xdf, 0x80, 0xbf}, {0xe0, 0xe0, 0xa0, 0xbf}, {0xe1, 0xec, 0x80, 0xbf}, {0xed, 0xed, 0x80, 0x9f},
        {0xee, 0xef, 0x80, 0xbf}, {0xf0, 0xf0, 0x90, 0xbf}, {0xf1, 0xf3, 0x80, 0xbf}, {0xf4, 0xf4, 0x80, 0x8f}};
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        int64_t length = f == 0 ? 1 : f == 1 ? 2 : f < 6 ? 3 : 4;
        if (text[at] < forms[f][0] || text[at] > forms[f][1] || at + length > size) continue;
        for (int64_t i = 1; i < length; i++)
            if (text[at + i] < (i == 1 ? forms[f][2] : 0x80) || text[at + i] > (i == 1 ? forms[f][3] : 0xbf)) return 0;
        return length;
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    int64_t first = next(&in, 1), second = next(&in, 1), length = (int64_t)in.left;
    uint8_t *text = bytes_of(length), *plain = bytes_of(LONGEST * length), *folds = bytes_of(6), *folded = bytes_of(LONGEST * length);
    int32_t *pages = bytes_of(4 * 0x1100), *starts = bytes_of(4 * ROWS * 256);
    for (int64_t i = 0; i < length; i++) text[i] = (uint8_t)next(&in, 1);
    memcpy(folds, "\4 ab \0", 6);
    for (int32_t page = 0; page < 0x1100; page++) pages[page] = page % ROWS;
    for (int32_t code = 0; code < ROWS * 256; code++) starts[code] = code % 7 == 0 ? 0 : code % 5 == 0 ? 5 : -1;
    int64_t *from = bytes_of(8 * LONGEST * length), *origins = bytes_of(8 * LONGEST * length), needed = 0, done = 0;
    for (int64_t at = 0, used; at < length; at += used ? used : 1) {
        used = length_at(text, length, at);
        const char *fold = " ";
        char own[5] = {0};
        if (used) {
            int64_t code = used == 1 ? text[at] : text[at] & (0xff >> (used + 1));
            for (int64_t i = 1; i < used; i++) code = code * 64 + text[at + i] % 64;
            fold = memcpy(own, text + at, (size_t)used);
            if (code % (ROWS * 256) % 7 == 0) fold = " ab ";
            else if (code % (ROWS * 256) % 5 == 0) fold = "";
        }
        for (; *fold; fold++)
            if (*fold != ' ' || !needed || plain[needed - 1] != ' ') from[needed] = at, plain[needed++] = (uint8_t)*fold;
    }
    binidx_folding f = {.pages = pages, .folds = starts, .bytes = folds};
    int64_t cuts[] = {0, length * (first < second ? first : second) / 256, length * (first < second ? second : first) / 256, length};
    for (int c = 0; c < 3; c++) {
        int64_t more = binidx_fold_text(&f, text + cuts[c], cuts[c + 1] - cuts[c], folded + done, origins + done);
        for (int64_t i = done; i < done + more; i++) origins[i] += cuts[c];
        done += more;
    }
    for (int64_t i = 0; i < f.num_part; i++) /* what is left would be blanks, as no character has begun and ended */
        if (!done || folded[done - 1] != ' ') origins[done] = length - f.num_part, folded[done++] = ' ';
    same(done == needed && !memcmp(folded, plain, (size_t)done) && !memcmp(origins, from, (size_t)(8 * done)));
    note(folded, done);
    free(text), free(plain), free(folds), free(folded), free(pages), free(starts), free(from), free(origins);
    return 0;
}
