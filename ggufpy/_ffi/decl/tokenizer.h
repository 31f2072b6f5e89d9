/* The inner loops of the tokenizers (tokenizer.c). Counts returned are -1 when there is no memory. */
typedef struct ggufpy_names ggufpy_names;
ggufpy_names * ggufpy_names_new(const char * bytes, const uint32_t * ends, int32_t n);
void ggufpy_names_free(ggufpy_names * names);

struct ggufpy_merging {
    const ggufpy_names * pairs;
    const double * ranks;
    int between;
    const ggufpy_names * tokens;
    const int32_t * byte_ids;
    const char * spelling;
    bool whole;
};

int32_t ggufpy_merge(const struct ggufpy_merging * how, const char * text, const uint32_t * ends, int32_t n_words,
                     int32_t * ids, uint32_t * id_ends);
int32_t ggufpy_longest(const ggufpy_names * tokens, const char * text, uint32_t n, int32_t * ids);
int32_t ggufpy_wordpiece(const ggufpy_names * tokens, int32_t unknown, const char * space, const char * alone,
                         const char * text, uint32_t n, int32_t * ids);

struct ggufpy_charsmap {
    const uint32_t * nodes;
    uint32_t n_nodes;
    const char * replacements;
    uint32_t n_replacements;
    const ggufpy_names * kept;
};

int64_t ggufpy_replace(const struct ggufpy_charsmap * map, const char * text, uint32_t n, char * out, int64_t room);
int32_t ggufpy_best(const ggufpy_names * tokens, const double * scores, double cost, int32_t unknown,
                    const int32_t * byte_ids, const char * text, uint32_t n, int32_t * ids);
