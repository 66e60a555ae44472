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
#include "binidx.h"
#include "json_value.h"

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
