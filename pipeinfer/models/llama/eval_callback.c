/* libllama's evaluation callback in C: computes what on_node in eval_callback.py computes, without running Python for
 * every node of a graph. Knows no struct of libggml: it gets names and data through libggml's functions. */

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* The same as State in eval_callback.py, which describes the fields. */
struct state {
    const char *(*name_of)(const void *tensor);
    void (*get)(const void *tensor, void *data, size_t offset, size_t n_bytes);
    void (*set)(void *tensor, const void *data, size_t offset, size_t n_bytes);
    bool (*stop)(void);
    const char *layer, *last, *input;
    char *out;
    const char *hidden;
    size_t n_out, n_hidden, n_at_once;
    bool between, stopped;
};

const size_t state_bytes = sizeof(struct state);
const char source[] = SOURCE;

static bool is(const char *name, const char *wanted) { return wanted && strcmp(name, wanted) == 0; }

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

bool on_node(void *tensor, bool ask, struct state *s) {
    const char *name = s->name_of(tensor);
    if (ask) {
        const bool is_layer = strncmp(name, s->layer, strlen(s->layer)) == 0;
        return (is_layer && s->between) || is(name, s->last) || is(name, s->input);
    }
    if (is(name, s->input)) {
        const size_t n_bytes = smaller(s->n_at_once, s->n_hidden);
        s->set(tensor, s->hidden, 0, n_bytes);
        s->hidden += n_bytes;
        s->n_hidden -= n_bytes;
        return true;
    }
    if (is(name, s->last)) {
        const size_t n_bytes = smaller(s->n_at_once, s->n_out);
        s->get(tensor, s->out, 0, n_bytes);
        s->out += n_bytes;
        s->n_out -= n_bytes;
        return false;
    }
    if (s->between && !s->stopped)
        s->stopped = s->stop();
    return !s->stopped;
}
