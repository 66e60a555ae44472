/* fuzz_jsonl.c: lines put together from pieces of JSON, read at once and one by one.
 *
 * What is read wrongly, and not only out of bounds, is found by tests/text/test_jsonl_oracle.py.
 *
 * Input: most texts 1, then a byte for each piece: below 128 one of PIECES, else itself less 128.
 */
#include "fuzz.h"

#include "binidx.h"

static const char *const PIECES[] = {
    "{", "}", "[", "]", ",", ":", "\"", "\\", "\n", " ", "{\"a\":\"", "\"}\n", "\"a\"", "\"b\"", "\"c\"", "\"a\":[\"",
    "\",\"", "\"]", "\"b\":\"", "\"c\":", "null", "true", "-12", "-0", "1.5e3", "\\n", "\\u00e9", "\\ud83d\\ude00", "\\udc00",
    "\\u12", "\xc3\xa9", "\xe8\xaa\x9e", "\xf0\x9f\x98\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "0123456789abcdef", "\"a\":\"\",\"b\":[]",
    "{\"a\":\"x\",\"b\":[\"y\",\"z\"],\"c\":7,\"d\":{\"e\":[1,2]}}\n",
};

enum { KEYS = 3, COUNT = sizeof PIECES / sizeof *PIECES };

typedef struct {
    binidx_jsonl lines;
    binidx_json_key keys[KEYS];
} reading;

static void begin(reading *r, const uint8_t *data, int64_t size, int64_t most_texts) {
    static const uint8_t names[] = "abc";
    *r = (reading){.lines = {.data = data, .size = size, .keys = r->keys, .num_keys = KEYS, .most_documents = size / 2 + 1}};
    r->lines.rows = bytes_of(8 * r->lines.most_documents), r->lines.places = bytes_of(8 * r->lines.most_documents);
    for (int k = 0; k < KEYS; k++) {
        binidx_json_key *key = &r->keys[k];
        *key = (binidx_json_key){.name = names + k, .name_bytes = 1, .most_bytes = size, .most_texts = most_texts};
        key->bytes = bytes_of(size), key->bounds = bytes_of(8 * (most_texts + 1)), key->bounds[0] = 0;
        if (k == 2) key->present = bytes_of(r->lines.most_documents);
        else key->documents = bytes_of(8 * (r->lines.most_documents + 1)), key->documents[0] = 0;
    }
}

static void end(reading *r) {
    for (int k = 0; k < KEYS; k++)
        free(r->keys[k].bytes), free(r->keys[k].bounds), free(r->keys[k].documents), free(r->keys[k].present);
    free(r->lines.rows), free(r->lines.places);
}

/* Reads on; how many lines were given back. */
static int64_t read_through(reading *r) {
    int64_t odd = 0, before = 0;
    while (binidx_read_jsonl(&r->lines) == BINIDX_NOT_PLAIN) {
        same(r->lines.position <= r->lines.stop && r->lines.stop <= r->lines.size);
        same(r->lines.stop == r->lines.size || r->lines.data[r->lines.stop] == '\n');
        same(r->lines.num_documents >= before);
        before = r->lines.num_documents, odd++, r->lines.row++;
        r->lines.position = r->lines.stop + (r->lines.stop < r->lines.size);
    }
    same(r->lines.position == r->lines.size && r->lines.row == r->lines.num_documents + odd);
    return odd;
}

static void check_bounds(const reading *r) {
    for (int k = 0; k < KEYS; k++) {
        const binidx_json_key *key = &r->keys[k];
        same(key->bounds[0] == 0 && key->bounds[key->num_texts] == key->num_bytes && key->num_bytes <= r->lines.size);
        for (int64_t t = 0; t < key->num_texts; t++) same(key->bounds[t] <= key->bounds[t + 1]);
        if (key->present) same(key->num_texts == r->lines.num_documents);
        else same(key->documents[0] == 0 && key->documents[r->lines.num_documents] == key->num_texts);
        note(key->bytes, key->num_bytes), note(key->bounds, 8 * (key->num_texts + 1));
    }
}

/* Each document alone has the texts that it has among the others. */
static void check_alone(const reading *all) {
    int64_t before[KEYS] = {0};
    for (int64_t d = 0; d < all->lines.num_documents; d++) {
        const uint8_t *line = all->lines.data + all->lines.places[d];
        int64_t left = all->lines.size - all->lines.places[d], size = 0;
        while (size < left && line[size] != '\n') size++;
        reading one;
        uint8_t *copy = bytes_of(size);
        memcpy(copy, line, (size_t)size);
        begin(&one, copy, size, size + 2);
        same(read_through(&one) == 0 && one.lines.num_documents == 1);
        for (int k = 0; k < KEYS; k++) {
            const binidx_json_key *key = &one.keys[k], *whole = &all->keys[k];
            int64_t start = whole->bounds[before[k]];
            same(memcmp(key->bytes, whole->bytes + start, (size_t)key->num_bytes) == 0);
            for (int64_t t = 0; t <= key->num_texts; t++) same(key->bounds[t] == whole->bounds[before[k] + t] - start);
            if (key->present) same(key->present[0] == whole->present[d]);
            before[k] += key->num_texts;
        }
        end(&one), free(copy);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t input_bytes) {
    fuzz_input in = {input, input_bytes};
    int64_t most_texts = next(&in, 1) * 8 + 1, size = 0;
    uint8_t *data = bytes_of((int64_t)in.left * 64);
    while (in.left) {
        int64_t byte = next(&in, 1);
        const char *piece = byte < 128 ? PIECES[byte % COUNT] : NULL;
        if (piece) memcpy(data + size, piece, strlen(piece)), size += (int64_t)strlen(piece);
        else data[size++] = (uint8_t)(byte - 128);
    }
    uint8_t *exact = bytes_of(size); /* a byte too many is seen */
    memcpy(exact, data, (size_t)size);
    reading all;
    begin(&all, exact, size, most_texts);
    read_through(&all);
    check_bounds(&all);
    check_alone(&all);
    end(&all), free(exact), free(data);
    return 0;
}
