/* Whether words of memory, or halves of such, are what they should be, stage by stage. */

#define AHEAD 40 /* Words that are asked for before they are needed. */

typedef struct { uint64_t address, value; } Word;
/* How many words there are up to the end of a stage, and how many halves. */
typedef struct { Py_ssize_t words, halves; } Stage;
typedef struct { HEAD Py_ssize_t stages_count, words_count, halves_count; Stage *stages; Word *words, *halves; } Words;

static uint64_t differs(const Word *one) { return word_at(one->address) ^ one->value; }

/* Four at a time: a stage may be read whatever stands in it. */
static int each_holds(const Word *one, const Word *stage_end, const Word *end) {
    for (; stage_end - one >= 4; one += 4) {
        if (end - one > AHEAD + 3) {
            __builtin_prefetch((const void *)(uintptr_t)one[AHEAD].address);
            __builtin_prefetch((const void *)(uintptr_t)one[AHEAD + 2].address);
        }
        if (differs(one) | differs(one + 1) | differs(one + 2) | differs(one + 3)) return 0;
    }
    for (; one < stage_end; one++)
        if (differs(one)) return 0;
    return 1;
}

static int words_hold(const Words *self) {
    if (!self->held) return 0;
    const Word *word = self->words, *half = self->halves;
    for (const Stage *stage = self->stages; stage < self->stages + self->stages_count; stage++) {
        if (!each_holds(word, self->words + stage->words, self->words + self->words_count)) return 0;
        word = self->words + stage->words;
        for (; half < self->halves + stage->halves; half++) {
            uint32_t found;
            memcpy(&found, (const void *)(uintptr_t)half->address, sizeof found);
            if (found != (uint32_t)half->value) return 0;
        }
    }
    return 1;
}

/* Room for so many more. NULL with an error where there is none. */
static Word *words_grown(Word *words, Py_ssize_t count, Py_ssize_t more) {
    Word *grown = PyMem_Realloc(words, (size_t)(count + more + 1) * sizeof *words);
    return grown ? grown : (Word *)PyErr_NoMemory();
}

static PyObject *words_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    return PyBool_FromLong(words_hold((Words *)self));
}

/* Words(held, ((addresses, values, size), ...)): bytes of 64 bits each, and how many bytes of each word count. */
static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *held, *stages;
    if (!no_names(names) || !PyArg_ParseTuple(args, "OO!", &held, &PyTuple_Type, &stages)) return NULL;
    if (!are_tuples(stages)) return NULL;
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = words_call;
    Py_INCREF(held);
    self->held = held;
    Py_ssize_t stages_count = PyTuple_GET_SIZE(stages);
    if (!(self->stages = PyMem_Calloc((size_t)stages_count + 1, sizeof(Stage)))) { PyErr_NoMemory(); goto failed; }
    for (Py_ssize_t index = 0; index < stages_count; index++) {
        PyObject *addresses, *values;
        const uint64_t *where, *what;
        int size;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(stages, index), "SSi", &addresses, &values, &size)) goto failed;
        Py_ssize_t count = numbers_of(addresses, &where, 1), values_count = numbers_of(values, &what, 1);
        if (count < 0 || values_count < 0) goto failed;
        if (values_count != count || (size != 4 && size != 8)) {
            PyErr_SetString(PyExc_ValueError, "as many values as addresses, of 4 or 8 bytes");
            goto failed;
        }
        Word **words = size == 8 ? &self->words : &self->halves;
        Py_ssize_t *known = size == 8 ? &self->words_count : &self->halves_count;
        Word *grown = words_grown(*words, *known, count);
        if (!grown) goto failed;
        *words = grown;
        for (Py_ssize_t one = 0; one < count; one++) grown[(*known)++] = (Word){where[one], what[one]};
        self->stages[self->stages_count++] = (Stage){self->words_count, self->halves_count};
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int words_clear(PyObject *self) {
    ((Words *)self)->stages_count = 0; /* nothing is read any more of what may be gone */
    Py_CLEAR(((Words *)self)->held);
    return 0;
}

static void words_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    words_clear(self);
    PyMem_Free(((Words *)self)->stages);
    PyMem_Free(((Words *)self)->words);
    PyMem_Free(((Words *)self)->halves);
    Py_TYPE(self)->tp_free(self);
}
