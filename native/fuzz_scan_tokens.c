/* fuzz_scan_tokens.c: patterns in documents, read in pieces, against a look at every place of every text.
 *
 * Input: patterns 1, flags 1, cut 1, then a byte a length of a pattern and its letters, and a byte a token or the end of
 * a document. Flags: 1 no table, two bytes a token; 2 samples; 4 long patterns; 8 little room for text; 16 long blocks;
 * 32 folded: the text of a document is folded whole. Token t of the table is t letters, so that 0 is empty and some are
 * longer than 16; or, to fold, t bytes among which are blanks, letters that fold, and parts of characters.
 */
#include "binidx.h"
#include "fuzz.h"

enum { PATTERNS = 6, TOKENS = 400, VOCABULARY = 24, MOST = 40, BITS = 8 };

static uint8_t letter(fuzz_input *in) { return (uint8_t)('a' + next(in, 1) % 2); }

/* 'B' is "b", U+00E8 is "a b", U+00E9 stays, U+00EA is nothing, ',' is a blank. */
static void fold_letters(binidx_folding *f, int32_t *pages, int32_t *folds) {
    memset(f, 0, sizeof *f), memset(folds, 255, 4 * 2 * 256);
    for (int page = 0; page < 0x1100; page++) pages[page] = page > 0;
    folds['B'] = 0, folds[0xe8] = 2, folds[0xea] = 6, folds[','] = 7;
    f->pages = pages, f->folds = folds, f->bytes = (const uint8_t *)"\1b\3a b\0\1 ";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, size};
    binidx_patterns p = {.num_patterns = 1 + next(&in, 1) % PATTERNS, .bits = BITS, .head_bits = 3};
    int64_t flags = next(&in, 1), cut = next(&in, 1), shortest = MOST, *bounds = bytes_of(8 * (p.num_patterns + 1));
    p.unit = flags & 1 ? 2 : 1, bounds[0] = 0;
    uint8_t *bytes = bytes_of(PATTERNS * MOST);
    for (int64_t k = 0; k < p.num_patterns; k++) {
        int64_t length = p.unit * (1 + next(&in, 1) % (flags & 4 ? MOST / 2 : 3));
        for (int64_t i = 0; i < length; i++) bytes[bounds[k] + i] = p.unit == 1 ? flags & 32 ? (uint8_t)"ab "[next(&in, 1) % 3] : letter(&in) : i % 2 ? 0 : letter(&in) % 4;
        bounds[k + 1] = bounds[k] + length;
        shortest = length < shortest ? length : shortest, p.longest = length > p.longest ? length : p.longest;
    }
    p.bytes = bytes, p.bounds = bounds, p.window = shortest;
    p.block = shortest >= 16 && flags & 16 ? 16 : shortest < 4 ? shortest : 4;
    p.stride = flags & 2 ? (shortest - p.block) / p.unit + 1 : 1;
    p.sampled = bytes_of(1 << (BITS - 3)), p.ends = bytes_of(1 << (BITS - 3)), p.heads = bytes_of(4 << 3), p.next = bytes_of(4 * p.num_patterns);
    same(binidx_index_patterns(&p) == p.num_patterns);
    uint8_t *table = bytes_of(VOCABULARY * VOCABULARY + 16), *text = bytes_of(TOKENS * VOCABULARY);
    int32_t *offsets = bytes_of(4 * (VOCABULARY + 1));
    offsets[0] = 0;
    for (int32_t t = 0; t < VOCABULARY; t++) {
        for (int32_t i = 0; i < t; i++)
            table[offsets[t] + i] = flags & 32 ? (uint8_t)"aB \xc3\xa9,b\xc3\xa8\xe2\xc3\xaa "[(t * t + i) % 13] : (uint8_t)('a' + (t * i >> 1) % 2);
        offsets[t + 1] = offsets[t] + t;
    }
    uint16_t *tokens = bytes_of(2 * TOKENS);
    int64_t *ends = bytes_of(8 * (TOKENS + 2)), count = 0, num_tokens = 0;
    ends[0] = 0;
    while (in.left && num_tokens < TOKENS && count < TOKENS) {
        int64_t token = next(&in, 1);
        if (token % 8 == 7) ends[++count] = num_tokens;
        else tokens[num_tokens++] = (uint16_t)(flags & 1 ? token % 4 : token % VOCABULARY);
    }
    ends[++count] = num_tokens;
    binidx_scan s = {.patterns = &p, .bytes = flags & 1 ? NULL : table, .offsets = offsets, .vocab_size = VOCABULARY,
                     .longest_token = VOCABULARY - 1, .item_bytes = 2};
    binidx_folding folding, whole;
    int32_t *pages = bytes_of(4 * 0x1100), *folds = bytes_of(4 * 2 * 256), *folded_offsets = bytes_of(4 * (VOCABULARY + 1));
    uint8_t *folded = bytes_of(3 * VOCABULARY * VOCABULARY + 16), *kinds = bytes_of(VOCABULARY), *plain = bytes_of(3 * TOKENS * VOCABULARY);
    fold_letters(&folding, pages, folds), folded_offsets[0] = 0, whole = folding;
    for (int32_t t = 0; t < VOCABULARY; t++, folding.num_part = folding.blank = 0) {
        uint8_t *token = folded + folded_offsets[t];
        int32_t length = (int32_t)binidx_fold_text(&folding, table + offsets[t], t, token, NULL);
        int starts = length && token[0] == ' ', stops = length && token[length - 1] == ' ';
        kinds[t] = (uint8_t)(starts | stops << 1 | !length << 2 | (folding.num_part > 0) << 3);
        folded_offsets[t + 1] = folded_offsets[t] + length;
    }
    if ((flags & 33) == 32) s.folding = &folding, s.folded = folded, s.folded_offsets = folded_offsets, s.kinds = kinds, s.longest_token = 3 * (VOCABULARY + 3);
    s.room = (flags & 8 ? 1 : 40) * (p.longest + s.longest_token + 17), s.text = bytes_of(s.room);
    s.room_hits = p.num_patterns + 1, s.hits = bytes_of(32 * s.room_hits), s.rows = bytes_of(8 * p.num_patterns);
    int64_t *matches = bytes_of(8 * count * p.num_patterns), *firsts = bytes_of(8 * count * p.num_patterns);
    memset(matches, 0, (size_t)(8 * count * p.num_patterns));
    int64_t middle = cut % (num_tokens + 1), *piece = bytes_of(8 * (count + 2)); /* two calls, cut at a token */
    for (int call = 0; call < 2; call++) {
        int64_t low = call ? middle : 0, high = call ? num_tokens : middle, first = 0, done = 0;
        while (first + 1 < count && ends[first + 1] <= low && call) first++;
        int64_t last = first;
        while (last < count && (last == first || ends[last] < high)) last++;
        for (int64_t d = first; d <= last; d++) piece[d - first] = (ends[d] < low ? low : ends[d] > high ? high : ends[d]) - low;
        while (done < last - first) {
            int64_t more = binidx_scan_documents(&s, tokens + low, piece + done, last - first - done, ends[last] > high);
            same(more >= 0);
            for (int64_t h = 0; h < s.num_hits; h++) {
                int64_t at = (first + done + s.hits[4 * h]) * p.num_patterns + s.hits[4 * h + 1];
                if (!matches[at]) firsts[at] = s.hits[4 * h + 3];
                matches[at] += s.hits[4 * h + 2];
            }
            done += more, s.num_hits = 0;
        }
    }
    for (int64_t d = 0; d < count; d++) {
        int64_t length = 0;
        for (int64_t t = ends[d]; t < ends[d + 1]; t++) {
            if (flags & 1) memcpy(text + length, tokens + t, 2), length += 2;
            else memcpy(text + length, table + offsets[tokens[t]], tokens[t]), length += tokens[t];
        }
        const uint8_t *sought = text;
        if (s.folding) whole.num_part = whole.blank = 0, length = binidx_fold_text(&whole, text, length, plain, NULL), sought = plain;
        for (int64_t k = 0; k < p.num_patterns; k++) {
            int64_t found = 0, first = -1, needed = bounds[k + 1] - bounds[k];
            for (int64_t at = 0; at + needed <= length; at += p.unit)
                if (!memcmp(sought + at, bytes + bounds[k], (size_t)needed)) first = found++ ? first : at;
            same(matches[d * p.num_patterns + k] == found && (!found || firsts[d * p.num_patterns + k] == first));
        }
    }
    note(matches, 8 * count * p.num_patterns);
    free(bounds), free(bytes), free(p.sampled), free(p.ends), free(p.heads), free(p.next), free(table), free(text), free(offsets);
    free(pages), free(folds), free(folded), free(folded_offsets), free(kinds), free(plain);
    free(tokens), free(ends), free(s.text), free(s.hits), free(s.rows), free(matches), free(firsts), free(piece);
    return 0;
}
