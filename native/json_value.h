/* json_value.h: any JSON value, to after it; and strings as UTF-8.
 *
 * Every function takes where it begins and where the line ends, looks at no byte beyond, and returns where it ended, or
 * NULL where it did not understand: what is wrong, nested deeper than DEEPEST, or a number longer than LONGEST_NUMBER.
 */
#ifndef BINIDX_JSON_VALUE_H
#define BINIDX_JSON_VALUE_H
#include <stdint.h>
#include <string.h>
#if defined __SSE2__
#include <emmintrin.h>
#elif defined __ARM_NEON
#include <arm_neon.h>
#endif

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
static inline place value(place at, place stop, int depth) {
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

#endif
