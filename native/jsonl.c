/* jsonl.c: texts and fields of lines of JSON into one buffer each, with where every text begins.
 *
 *     {"id": 7, "text": "Pa\u0072is\n"}         text   P a r i s \n r o m e O s l o
 *     {"text": ["rome", "Oslo"]}       ---->          bounds 0 6 10 14, documents 0 1 (3)
 *                                             id     7 (absent)
 *
 * A line is a document only if all of it was understood: every byte of it is looked at, UTF-8 and all, so that what is
 * accepted here is what Python's json.loads accepts, with the same strings. Whatever is not plain goes back to the caller
 * with nothing written: another type than wanted, a key that is missing, escaped or there twice, nesting beyond DEEPEST,
 * numbers of more than LONGEST_NUMBER bytes, blank lines, and all that is wrong. The caller asks the library then.
 *
 * Cost: of one core 0.55 ms a MB of code, where every 24th byte is escaped; runs of plain ASCII go 16 bytes at a time, the
 * rest byte by byte. Source: us; the grammar is RFC 8259's, the pairs of surrogates are Python's.
 */
#include <string.h>
#if defined __SSE2__
#include <emmintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

#include "binidx.h"

enum { DEEPEST = 32, LONGEST_NUMBER = 1000, BLOCK = 16 };

typedef const uint8_t *place; /* NULL: not understood */

static inline place after_space(place at, place stop) {
    while (at < stop && (*at == ' ' || *at == '\t' || *at == '\r')) at++;
    return at;
}

/* Neither a quote, a backslash, a control character nor a part of a longer one: as int8_t those are below a space. */
static inline int is_plain(uint8_t byte) { return (int8_t)byte >= 0x20 && byte != '"' && byte != '\\'; }

/* How many of the BLOCK bytes from here on are plain before the first that is not. */
#if defined __SSE2__
static inline int plain_bytes(place at) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)at);
    __m128i other = _mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20));
    other = _mm_or_si128(other, _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')));
    other = _mm_or_si128(other, _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\')));
    return __builtin_ctz((unsigned)_mm_movemask_epi8(other) | 1u << BLOCK);
}
#elif defined __ARM_NEON
static inline int plain_bytes(place at) {
    uint8x16_t bytes = vld1q_u8(at), other = vcltq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(0x20));
    other = vorrq_u8(other, vceqq_u8(bytes, vdupq_n_u8('"')));
    other = vorrq_u8(other, vceqq_u8(bytes, vdupq_n_u8('\\')));
    /* four bits a byte: the instruction that narrows is NEON's movemask */
    uint64_t mask = vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(other), 4)), 0);
    return mask ? __builtin_ctzll(mask) >> 2 : BLOCK;
}
#else
static inline int plain_bytes(place at) {
    int count = 0;
    while (count < BLOCK && is_plain(at[count])) count++;
    return count;
}
#endif

/* One character of two bytes or more, as UTF-8 has it: none too long, no surrogates, none past U+10FFFF. */
static inline int character_bytes(place at, place stop) {
    uint8_t first = at[0];
    int count = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
    if (!count || stop - at < count) return 0;
    uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (at[1] < low || at[1] > high) return 0;
    for (int i = 2; i < count; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    return count;
}

/* Four hexadecimal digits, or -1. */
static inline int32_t hexadecimal(place at, place stop) {
    int32_t code = 0;
    if (stop - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        uint8_t digit = (uint8_t)(at[i] - '0'), letter = (uint8_t)((at[i] | 0x20) - 'a');
        if (digit > 9 && letter > 5) return -1;
        code = code << 4 | (digit <= 9 ? digit : letter + 10);
    }
    return code;
}

static inline uint8_t *put_character(uint8_t *out, int32_t code) {
    if (code < 0x80) return *out++ = (uint8_t)code, out;
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    *out++ = (uint8_t)((more == 1 ? 0xc0 : more == 2 ? 0xe0 : 0xf0) | code >> 6 * more);
    while (more--) *out++ = (uint8_t)(0x80 | (code >> 6 * more & 0x3f));
    return out;
}

/* What follows "\u": one code, or the two of a pair. A half of one is fine only where nobody wants the string. */
static inline place unicode_escape(place at, place stop, uint8_t **out) {
    int32_t code = hexadecimal(at, stop);
    if (code < 0) return NULL;
    at += 4;
    if (!out) return at;
    if ((code & 0xf800) == 0xd800) {
        int32_t second = code < 0xdc00 && stop - at >= 2 && at[0] == '\\' && at[1] == 'u' ? hexadecimal(at + 2, stop) : 0;
        if ((second & 0xfc00) != 0xdc00 || second < 0) return NULL;
        code = 0x10000 + ((code & 0x3ff) << 10 | (second & 0x3ff));
        at += 6;
    }
    *out = put_character(*out, code);
    return at;
}

/* What follows a backslash. */
static inline place escape(place at, place stop, uint8_t **out) {
    static const uint8_t meant[256] = {['"'] = '"',  ['\\'] = '\\', ['/'] = '/',  ['b'] = '\b',
                                       ['f'] = '\f', ['n'] = '\n',  ['r'] = '\r', ['t'] = '\t'};
    if (at == stop) return NULL;
    if (*at == 'u') return unicode_escape(at + 1, stop, out);
    if (!meant[*at]) return NULL;
    if (out) *(*out)++ = meant[*at];
    return at + 1;
}

/* What follows the quote, to after the closing one; out NULL: nobody wants it. No more bytes are
 * written, with those that are written over again, than were read. */
static inline place string(place at, place stop, uint8_t **out) {
    while (at && at < stop) {
        for (int count = BLOCK; count == BLOCK && stop - at >= BLOCK; at += count) {
            count = plain_bytes(at);
            if (out) memcpy(*out, at, BLOCK), *out += count;
        }
        for (; at < stop && is_plain(*at); at++)
            if (out) *(*out)++ = *at;
        if (at == stop) return NULL;
        if (*at == '"') return at + 1;
        if (*at == '\\') {
            at = escape(at + 1, stop, out);
            continue;
        }
        place begun = at;
        for (int count; at < stop && *at >= 0x80; at += count)
            if (!(count = character_bytes(at, stop))) return NULL;
        if (at == begun) return NULL; /* a control character */
        if (out) memcpy(*out, begun, (size_t)(at - begun)), *out += at - begun;
    }
    return NULL;
}

static inline place digits(place at, place stop) {
    place begun = at;
    while (at < stop && *at >= '0' && *at <= '9') at++;
    return at == begun ? NULL : at;
}

/* The part of a number before its fraction. */
static inline place integer(place at, place stop) {
    if (at < stop && *at == '-') at++;
    return at < stop && *at == '0' ? at + 1 : digits(at, stop);
}

static inline place number(place at, place stop) {
    place begun = at;
    at = integer(at, stop);
    if (at && at < stop && *at == '.') at = digits(at + 1, stop);
    if (at && at < stop && (*at | 0x20) == 'e') {
        at++;
        if (at < stop && (*at == '+' || *at == '-')) at++;
        at = digits(at, stop);
    }
    return at && at - begun <= LONGEST_NUMBER ? at : NULL;
}

/* Those of JSON, and those that Python writes for floats. */
static inline place literal(place at, place stop) {
    static const char *const words[] = {"true", "false", "null", "NaN", "Infinity", "-Infinity"};
    for (int w = 0; w < 6; w++) {
        size_t count = strlen(words[w]);
        if ((size_t)(stop - at) >= count && memcmp(at, words[w], count) == 0) return at + count;
    }
    return NULL;
}

/* Any value, to after it. */
static place value(place at, place stop, int depth) {
    if (at == stop) return NULL;
    if (*at == '"') return string(at + 1, stop, NULL);
    if (*at != '{' && *at != '[') {
        place after = number(at, stop);
        return after ? after : literal(at, stop);
    }
    if (depth == DEEPEST) return NULL;
    uint8_t close = *at == '{' ? '}' : ']';
    at = after_space(at + 1, stop);
    if (at < stop && *at == close) return at + 1;
    for (;;) {
        if (close == '}') {
            if (at == stop || *at != '"' || !(at = string(at + 1, stop, NULL))) return NULL;
            at = after_space(at, stop);
            if (at == stop || *at++ != ':') return NULL;
            at = after_space(at, stop);
        }
        if (!(at = value(at, stop, depth + 1))) return NULL;
        at = after_space(at, stop);
        if (at == stop || (*at != ',' && *at != close)) return NULL;
        if (*at++ == close) return at;
        at = after_space(at, stop);
    }
}

/* A string that is one more text of its key. */
static inline place one_text(binidx_json_key *key, place at, place stop) {
    uint8_t *out = key->bytes + key->num_bytes;
    if (at == stop || *at != '"' || !(at = string(at + 1, stop, &out))) return NULL;
    key->num_bytes = out - key->bytes;
    key->bounds[++key->num_texts] = key->num_bytes;
    return at;
}

/* A text, or a list of them. */
static place texts(binidx_json_key *key, place at, place stop) {
    if (at == stop || *at != '[') return one_text(key, at, stop);
    at = after_space(at + 1, stop);
    if (at < stop && *at == ']') return at + 1;
    for (;;) {
        if (!(at = one_text(key, at, stop))) return NULL;
        at = after_space(at, stop);
        if (at == stop || (*at != ',' && *at != ']')) return NULL;
        if (*at++ == ']') return at;
        at = after_space(at, stop);
    }
}

/* The value of a field: a string as it is, an integer, true or false as they stand, null as if it were not there. */
static place field(binidx_json_key *key, place at, place stop, int64_t document) {
    if (at == stop) return NULL;
    if (*at == '"') {
        if (!(at = one_text(key, at, stop))) return NULL;
        return key->present[document] = 1, at;
    }
    place begun = at, end = *at >= 'a' ? literal(at, stop) : integer(at, stop);
    if (!end || end - begun > 18 || (begun[0] == '-' && begun[1] == '0')) return NULL; /* json writes 0 for -0 */
    int there = *begun != 'n';
    if (there) memcpy(key->bytes + key->num_bytes, begun, (size_t)(end - begun)), key->num_bytes += end - begun;
    key->bounds[++key->num_texts] = key->num_bytes;
    return key->present[document] = (uint8_t)there, end;
}

/* The number of the key whose name is here, or -1. */
static inline int64_t key_of(const binidx_jsonl *j, place name, int64_t bytes) {
    for (int64_t k = 0; k < j->num_keys; k++)
        if (j->keys[k].name_bytes == bytes && memcmp(j->keys[k].name, name, (size_t)bytes) == 0) return k;
    return -1;
}

/* A member of the object, to after its value; *seen has a bit for each key that was there. */
static place member(binidx_jsonl *j, place at, place stop, uint64_t *seen) {
    if (at == stop || *at != '"') return NULL;
    place name = at + 1;
    if (!(at = string(name, stop, NULL)) || memchr(name, '\\', (size_t)(at - name))) return NULL;
    int64_t k = key_of(j, name, at - 1 - name);
    at = after_space(at, stop);
    if (at == stop || *at++ != ':') return NULL;
    at = after_space(at, stop);
    if (k < 0) return value(at, stop, 0);
    if (*seen >> k & 1) return NULL;
    *seen |= (uint64_t)1 << k;
    return j->keys[k].present ? field(&j->keys[k], at, stop, j->num_documents) : texts(&j->keys[k], at, stop);
}

/* A line that is a document, 1; or 0. */
static int object(binidx_jsonl *j, place at, place stop, uint64_t *seen) {
    at = after_space(at, stop);
    if (at == stop || *at++ != '{') return 0;
    do {
        at = after_space(at, stop);
        if (!(at = member(j, at, stop, seen))) return 0;
        at = after_space(at, stop);
        if (at == stop || (*at != ',' && *at != '}')) return 0;
    } while (*at++ == ',');
    return after_space(at, stop) == stop;
}

/* Whether there is room for whatever the line holds. */
static int has_room(const binidx_jsonl *j, int64_t bytes) {
    if (j->num_documents == j->most_documents) return 0;
    for (int64_t k = 0; k < j->num_keys; k++) {
        const binidx_json_key *key = &j->keys[k];
        if (key->most_bytes - key->num_bytes < bytes || key->most_texts - key->num_texts <= bytes / 2) return 0;
    }
    return 1;
}

/* The document that the line is, with all its keys; or nothing. */
static int document(binidx_jsonl *j, place at, place stop) {
    uint64_t seen = 0;
    for (int64_t k = 0; k < j->num_keys; k++)
        j->keys[k].bytes_before = j->keys[k].num_bytes, j->keys[k].texts_before = j->keys[k].num_texts;
    int good = has_room(j, stop - at) && object(j, at, stop, &seen);
    for (int64_t k = 0; k < j->num_keys && good; k++) {
        binidx_json_key *key = &j->keys[k];
        if (seen >> k & 1) continue;
        if (!key->present) good = 0;
        else key->present[j->num_documents] = 0, key->bounds[++key->num_texts] = key->num_bytes;
    }
    for (int64_t k = 0; k < j->num_keys; k++) {
        binidx_json_key *key = &j->keys[k];
        if (!good) key->num_bytes = key->bytes_before, key->num_texts = key->texts_before;
        else if (!key->present) key->documents[j->num_documents + 1] = key->num_texts;
    }
    return good;
}

int64_t binidx_read_jsonl(binidx_jsonl *j) {
    while (j->position < j->size) {
        place at = j->data + j->position, end = memchr(at, '\n', (size_t)(j->size - j->position));
        j->stop = end ? end - j->data : j->size;
        if (!document(j, at, j->data + j->stop)) return BINIDX_NOT_PLAIN;
        j->rows[j->num_documents] = j->row++;
        j->places[j->num_documents++] = j->position;
        j->position = j->stop + (end != NULL);
    }
    return j->num_documents;
}
