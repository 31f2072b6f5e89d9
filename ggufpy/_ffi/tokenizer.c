/* Owns the inner loops of the tokenizers, for texts that are long enough to be worth it. What they compute is defined
   by their Python twins in ggufpy/tokenizer: merging.py, lattice.py, longest.py, charsmap.py. Knows nothing of ggml. */

/* --- names: strings of bytes and their indices ---------------------------------------------------------------- */

typedef struct ggufpy_names {
    const uint8_t * bytes; /* the caller's, as is `ends`: string i is bytes[ends[i - 1]] up to bytes[ends[i]] */
    const uint32_t * ends;
    struct { uint32_t tag; int32_t index; } * slots; /* open addressing; index is one more than the string's, 0: free */
    uint64_t * marks; /* two bits by a hash: some string begins with what has it, or is it. Wrong for few hashes only */
    int bits;
} ggufpy_names;

static inline uint64_t hashed(uint64_t hash, uint8_t byte) {
    return ((hash << 5 | hash >> 59) ^ byte) * 0x517cc1b727220a95u;
}

static inline uint64_t hashed_all(uint64_t hash, const uint8_t * bytes, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        hash = hashed(hash, bytes[i]);
    }
    return hash;
}

static inline uint32_t start_of(const uint32_t * ends, int32_t i) { return i ? ends[i - 1] : 0; }

enum { BEGINNING = 1, STRING = 2 };

static inline int marks(const ggufpy_names * names, uint64_t hash) {
    uint64_t place = hash >> (60 - names->bits);
    return (int) (names->marks[place >> 5] >> 2 * (place & 31) & 3);
}

static inline void mark(ggufpy_names * names, uint64_t hash, uint64_t what) {
    uint64_t place = hash >> (60 - names->bits);
    names->marks[place >> 5] |= what << 2 * (place & 31);
}

/* The index of the string that is `left`, the byte `between` unless it is negative, and `right`; or -1. */
static int32_t find(const ggufpy_names * names, uint64_t hash, const uint8_t * left, uint32_t n_left, int between,
                    const uint8_t * right, uint32_t n_right) {
    uint32_t mask = (1u << names->bits) - 1, n = n_left + (between >= 0) + n_right;
    for (uint32_t slot = (uint32_t) (hash >> (64 - names->bits));; slot = (slot + 1) & mask) {
        int32_t i = names->slots[slot].index - 1;
        if (i < 0) {
            return -1;
        }
        if (names->slots[slot].tag != (uint32_t) hash || names->ends[i] - start_of(names->ends, i) != n) {
            continue;
        }
        const uint8_t * name = names->bytes + start_of(names->ends, i);
        if (memcmp(name, left, n_left) == 0 && (between < 0 || name[n_left] == between) &&
            memcmp(name + n - n_right, right, n_right) == 0) {
            return i;
        }
    }
}

static int32_t find_one(const ggufpy_names * names, uint64_t hash, const uint8_t * bytes, uint32_t n) {
    return find(names, hash, bytes, n, -1, bytes, 0);
}

static void ggufpy_names_free(ggufpy_names * names) {
    if (names) {
        free(names->slots);
        free(names->marks);
        free(names);
    }
}

/* Of equal strings the first counts. */
static ggufpy_names * ggufpy_names_new(const char * bytes, const uint32_t * ends, int32_t n) {
    ggufpy_names * names = calloc(1, sizeof(ggufpy_names));
    if (!names) {
        return NULL;
    }
    names->bytes = (const uint8_t *) bytes;
    names->ends = ends;
    for (names->bits = 6; (1ll << names->bits) < 2ll * n; names->bits++) {
    }
    names->slots = calloc((size_t) 1 << names->bits, sizeof(names->slots[0]));
    names->marks = calloc((size_t) 1 << (names->bits - 1), sizeof(uint64_t)); /* 16 places for each slot */
    if (!names->slots || !names->marks) {
        ggufpy_names_free(names);
        return NULL;
    }
    for (int32_t i = 0; i < n; i++) {
        const uint8_t * name = names->bytes + start_of(ends, i);
        uint32_t size = ends[i] - start_of(ends, i);
        uint64_t hash = 0;
        for (uint32_t k = 0; k < size; k++) {
            hash = hashed(hash, name[k]);
            mark(names, hash, BEGINNING);
        }
        mark(names, hash, STRING);
        if (size && find_one(names, hash, name, size) < 0) {
            uint32_t slot = (uint32_t) (hash >> (64 - names->bits));
            while (names->slots[slot].index) {
                slot = (slot + 1) & ((1u << names->bits) - 1);
            }
            names->slots[slot].tag = (uint32_t) hash;
            names->slots[slot].index = i + 1;
        }
    }
    return names;
}

/* How long a character is by its first byte. */
static inline uint32_t promised(uint8_t byte) { return byte < 0xc0 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4; }

/* --- merging --------------------------------------------------------------------------------------------------- */

struct ggufpy_merging {
    const ggufpy_names * pairs;
    const double * ranks;      /* of each pair; NULL: the pair's own index */
    int between;               /* the byte that stands between the parts of a pair, or -1 */
    const ggufpy_names * tokens;
    const int32_t * byte_ids;  /* for a symbol that is no token; negative: none */
    const char * spelling;     /* two bytes for each byte, 0: no second one; NULL: the text is spelled already */
    bool whole;                /* a word that is a token is not merged */
};

typedef struct { uint32_t start, size; int32_t before, after; uint64_t hash; double rank; } symbol;
typedef struct { double rank; int32_t left; } candidate;
typedef struct { symbol * symbols; candidate * queue; int32_t n_queued; const uint8_t * word; } workspace;

static inline bool goes_first(candidate a, candidate b) {
    return a.rank < b.rank || (a.rank == b.rank && a.left < b.left);
}

static void push(workspace * work, candidate new) {
    int32_t i = work->n_queued++;
    for (; i && goes_first(new, work->queue[(i - 1) / 2]); i = (i - 1) / 2) {
        work->queue[i] = work->queue[(i - 1) / 2];
    }
    work->queue[i] = new;
}

static candidate pop(workspace * work) {
    candidate first = work->queue[0], last = work->queue[--work->n_queued];
    int32_t i = 0;
    for (int32_t child; (child = 2 * i + 1) < work->n_queued; i = child) {
        child += child + 1 < work->n_queued && goes_first(work->queue[child + 1], work->queue[child]);
        if (!goes_first(work->queue[child], last)) {
            break;
        }
        work->queue[i] = work->queue[child];
    }
    work->queue[i] = last;
    return first;
}

/* Look up the pair of a symbol and the one after it, and queue it if there is one. NAN is the rank of none. */
static void look_up(const struct ggufpy_merging * how, workspace * work, int32_t left) {
    symbol * a = &work->symbols[left];
    a->rank = NAN;
    if (a->after < 0) {
        return;
    }
    symbol * b = &work->symbols[a->after];
    uint64_t hash = how->between < 0 ? a->hash : hashed(a->hash, (uint8_t) how->between);
    const uint8_t * right = work->word + b->start;
    hash = hashed_all(hash, right, b->size);
    int32_t i = find(how->pairs, hash, work->word + a->start, a->size, how->between, right, b->size);
    if (i >= 0) {
        a->rank = how->ranks ? how->ranks[i] : i;
        push(work, (candidate) {a->rank, left});
    }
}

static void merge_symbols(const struct ggufpy_merging * how, workspace * work, uint32_t n) {
    int32_t count = 0;
    for (uint32_t at = 0; at < n; count++) {
        uint32_t size = promised(work->word[at]);
        size = size < n - at ? size : n - at;
        work->symbols[count] = (symbol) {at, size, count - 1, count + 1, hashed_all(0, work->word + at, size), NAN};
        at += size;
    }
    work->symbols[count - 1].after = -1;
    work->n_queued = 0;
    for (int32_t i = 0; i < count; i++) {
        look_up(how, work, i);
    }
    while (work->n_queued) {
        candidate best = pop(work);
        symbol * left = &work->symbols[best.left];
        if (left->rank != best.rank) {
            continue; /* one of the two has been merged into something else meanwhile */
        }
        symbol * right = &work->symbols[left->after];
        left->hash = hashed_all(left->hash, work->word + right->start, right->size);
        left->size += right->size;
        left->after = right->after;
        right->rank = NAN;
        if (left->after >= 0) {
            work->symbols[left->after].before = best.left;
        }
        if (left->before >= 0) {
            look_up(how, work, left->before);
        }
        look_up(how, work, best.left);
    }
}

static int32_t * write_ids(const struct ggufpy_merging * how, const workspace * work, int32_t * ids) {
    for (int32_t i = 0; i >= 0; i = work->symbols[i].after) {
        const symbol * s = &work->symbols[i];
        const uint8_t * bytes = work->word + s->start;
        int32_t id = find_one(how->tokens, s->hash, bytes, s->size);
        if (id >= 0) {
            *ids++ = id;
            continue;
        }
        for (uint32_t k = 0; k < s->size; k++) {
            if (how->byte_ids[bytes[k]] >= 0) {
                *ids++ = how->byte_ids[bytes[k]];
            }
        }
    }
    return ids;
}

static uint32_t spell(const char * spelling, const uint8_t * word, uint32_t n, uint8_t * spelled) {
    uint32_t size = 0;
    for (uint32_t i = 0; i < n; i++) {
        spelled[size++] = (uint8_t) spelling[2 * word[i]];
        if (spelling[2 * word[i] + 1]) {
            spelled[size++] = (uint8_t) spelling[2 * word[i] + 1];
        }
    }
    return size;
}

/* Write the ids of words, at most two for each byte, and where those of each word end; return how many there are. */
static int32_t ggufpy_merge(const struct ggufpy_merging * how, const char * text, const uint32_t * ends,
                            int32_t n_words, int32_t * ids, uint32_t * id_ends) {
    uint32_t longest = 1;
    for (int32_t i = 0; i < n_words; i++) {
        uint32_t size = ends[i] - start_of(ends, i);
        longest = size > longest ? size : longest;
    }
    workspace work = {malloc(2 * (size_t) longest * sizeof(symbol)), malloc(6 * (size_t) longest * sizeof(candidate)),
                      0, NULL};
    uint8_t * spelled = malloc(2 * (size_t) longest);
    int32_t * end = work.symbols && work.queue && spelled ? ids : NULL;
    for (int32_t i = 0; end && i < n_words; i++) {
        work.word = (const uint8_t *) text + start_of(ends, i);
        uint32_t n = ends[i] - start_of(ends, i);
        if (how->spelling) {
            n = spell(how->spelling, work.word, n, spelled);
            work.word = spelled;
        }
        int32_t id = how->whole ? find_one(how->tokens, hashed_all(0, work.word, n), work.word, n) : -1;
        if (id >= 0) {
            *end++ = id;
        } else if (n) {
            merge_symbols(how, &work, n);
            end = write_ids(how, &work, end);
        }
        id_ends[i] = (uint32_t) (end - ids);
    }
    free(work.symbols);
    free(work.queue);
    free(spelled);
    return end ? (int32_t) (end - ids) : -1;
}

/* --- the longest token from the left ---------------------------------------------------------------------------- */

/* Return the longest token that the bytes begin with, and its size; -1 and 1 when there is none. */
static int32_t longest(const ggufpy_names * tokens, const uint8_t * bytes, uint32_t n, uint32_t * size) {
    for (uint32_t end = 0;; n = end - 1, end = 0) { /* again for a wrong mark */
        uint64_t hash = 0, found = 0;
        for (uint32_t k = 1; k <= n; k++) {
            hash = hashed(hash, bytes[k - 1]);
            int marked = marks(tokens, hash);
            if (!(marked & BEGINNING)) {
                break;
            }
            if (marked & STRING) {
                end = k;
                found = hash;
            }
        }
        int32_t id = end ? find_one(tokens, found, bytes, end) : -1;
        if (id >= 0 || !end) {
            *size = end ? end : 1;
            return id;
        }
    }
}

/* Write the ids of a text, -1 for a byte that begins no token; return how many there are. */
static int32_t ggufpy_longest(const ggufpy_names * tokens, const char * text, uint32_t n, int32_t * ids) {
    int32_t count = 0;
    for (uint32_t at = 0, size; at < n; at += size) {
        ids[count++] = longest(tokens, (const uint8_t *) text + at, n - at, &size);
    }
    return count;
}

/* Do so for words between spaces, `space` put before each; characters of ASCII in `alone` are words of their own. A
   word that has a byte that begins no token is `unknown`. At most one id for each byte, those of `space` included. */
static int32_t ggufpy_wordpiece(const ggufpy_names * tokens, int32_t unknown, const char * space, const char * alone,
                                const char * text, uint32_t n, int32_t * ids) {
    uint32_t n_space = (uint32_t) strlen(space);
    uint8_t * word = malloc(n_space + (size_t) n);
    if (!word) {
        return -1;
    }
    memcpy(word, space, n_space);
    int32_t count = 0;
    for (uint32_t at = 0, end; at < n; at = end) {
        const uint8_t * bytes = (const uint8_t *) text;
        for (end = at; end < n && bytes[end] != ' ' && (bytes[end] >= 128 || !alone[bytes[end]]); end++) {
        }
        if (end == at && bytes[end++] == ' ') {
            continue;
        }
        memcpy(word + n_space, bytes + at, end - at);
        int32_t first = count;
        for (uint32_t k = 0, size, all = n_space + end - at; k < all; k += size) {
            ids[count++] = longest(tokens, word + k, all - k, &size);
            if (ids[count - 1] < 0) {
                ids[first] = unknown;
                count = first + 1;
                break;
            }
        }
    }
    free(word);
    return count;
}

/* --- the character map ------------------------------------------------------------------------------------------- */

struct ggufpy_charsmap {
    const uint32_t * nodes;
    uint32_t n_nodes;
    const char * replacements; /* each ends with a zero byte */
    uint32_t n_replacements;   /* bytes up to the last one */
    const ggufpy_names * kept; /* all beginnings of what is not replaced */
};

static inline uint32_t children(uint32_t node) { return node >> 10 << (node & 1 << 9 ? 8 : 0); }

/* Return what replaces the longest match at the beginning and set its size; NULL for none. Clears `ok` for a bad map. */
static const char * replacement(const struct ggufpy_charsmap * map, const uint8_t * bytes, uint32_t n, uint32_t * size,
                                bool * ok) {
    int64_t found = -1;
    uint32_t at = map->n_nodes ? children(map->nodes[0]) : 0;
    for (uint32_t k = 0; map->n_nodes && k < n && bytes[k]; k++) {
        at ^= bytes[k];
        uint32_t node = at < map->n_nodes ? map->nodes[at] : 0;
        *ok = *ok && at < map->n_nodes;
        if ((node & (1u << 31 | 0xff)) != bytes[k]) {
            break;
        }
        at ^= children(node);
        if (node >> 8 & 1) {
            *ok = *ok && at < map->n_nodes;
            found = *ok ? map->nodes[at] & ~(1u << 31) : 0;
            *size = k + 1;
        }
    }
    *ok = *ok && found < map->n_replacements;
    return *ok && found >= 0 ? map->replacements + found : NULL;
}

/* How long the character is; 0 for a byte that begins none. */
static uint32_t character(const uint8_t * bytes, uint32_t n) {
    uint32_t size = promised(bytes[0]);
    bool good = bytes[0] < 0x80 || (bytes[0] >= 0xc0 && bytes[0] < 0xf8 && size <= n);
    for (uint32_t k = 1; good && k < size; k++) {
        good = bytes[k] >> 6 == 2;
    }
    return good ? size : 0;
}

/* Write a text with all that the map knows replaced, if there is room; return its size, or -1 for a bad map. */
static int64_t ggufpy_replace(const struct ggufpy_charsmap * map, const char * text, uint32_t n, char * out,
                              int64_t room) {
    int64_t done = 0;
    bool ok = true;
    for (uint32_t at = 0, size, n_part; at < n && ok; at += size, done += n_part) {
        const uint8_t * bytes = (const uint8_t *) text + at;
        const char * part = text + at;
        if (longest(map->kept, bytes, n - at, &size) >= 0) {
            n_part = size;
        } else if ((part = replacement(map, bytes, n - at, &size, &ok))) {
            n_part = (uint32_t) strlen(part);
        } else if ((n_part = size = character(bytes, n - at))) {
            part = text + at;
        } else {
            part = "\xef\xbf\xbd";
            n_part = 3;
            size = 1;
        }
        if (done + n_part <= room) {
            memcpy(out + done, part, n_part);
        }
    }
    return ok ? done : -1;
}

/* --- the best path ----------------------------------------------------------------------------------------------- */

/* Write the ids of the path with the greatest sum of scores, the last first. A character that is no token costs `cost`
   and is `unknown`, as are several in a row; or, unless `byte_ids` is NULL, these ids of its bytes, and it is weighed
   against a token for it too. At most one id for each byte. */
static int32_t ggufpy_best(const ggufpy_names * tokens, const double * scores, double cost, int32_t unknown,
                           const int32_t * byte_ids, const char * text, uint32_t n, int32_t * ids) {
    const uint8_t * bytes = (const uint8_t *) text;
    struct step { double sum; uint32_t start; int32_t id; } * steps = malloc((n + 1) * sizeof(struct step));
    if (!steps) {
        return -1;
    }
    for (uint32_t i = 0; i <= n; i++) {
        steps[i] = (struct step) {i ? -INFINITY : 0.0, 0, -1};
    }
    for (uint32_t start = 0, size; start < n; start += size) {
        size = promised(bytes[start]);
        size = size < n - start ? size : n - start;
        bool is_unknown = true;
        uint64_t hash = 0;
        for (uint32_t k = 1; k <= n - start; k++) {
            hash = hashed(hash, bytes[start + k - 1]);
            int marked = marks(tokens, hash);
            if (!(marked & BEGINNING)) {
                break;
            }
            int32_t id = marked & STRING ? find_one(tokens, hash, bytes + start, k) : -1;
            if (id >= 0) {
                is_unknown = is_unknown && k != size;
                double sum = steps[start].sum + scores[id];
                if (sum > steps[start + k].sum) {
                    steps[start + k] = (struct step) {sum, start, id};
                }
            }
        }
        double sum = steps[start].sum + cost;
        if ((is_unknown || byte_ids) && sum > steps[start + size].sum) {
            steps[start + size] = (struct step) {sum, start, -1};
        }
    }
    int32_t count = 0;
    for (uint32_t end = n; end; end = steps[end].start) {
        int32_t id = steps[end].id < 0 ? unknown : steps[end].id;
        if (byte_ids && steps[end].id < 0) {
            for (uint32_t k = steps[end].start; k < end; k++) {
                ids[count++] = byte_ids[bytes[k]];
            }
        } else if (!count || id != unknown || ids[count - 1] != unknown) {
            ids[count++] = id;
        }
    }
    free(steps);
    return count;
}
