/* Looks at what a replay depends on, without Python: `optimizations.host_code` says when and by whom it is compiled.

   Everything here compares. Which words of memory, and what they mean, is the business of whoever makes these objects;
   they hold the objects whose memory they read. Nothing gives Python's lock away, and nothing allocates but the lists
   that `Looks` and `Arguments` return. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Watchers of dicts came with 3.12, and what 3.12 called the version of a dict left with 3.14. */
#define HAS_WATCHERS (PY_VERSION_HEX >= 0x030C0000)
#define HAS_VERSIONS (PY_VERSION_HEX < 0x030E0000)
#define AHEAD 24 /* Entries of a table that are asked for before they are needed. */

static uint64_t word_at(uint64_t address) {
    uint64_t found;
    memcpy(&found, (const void *)(uintptr_t)address, sizeof found);
    return found;
}

/* The numbers of a bytes object, in groups of so many: how many groups. -1 with an error where there are parts of one. */
static Py_ssize_t numbers_of(PyObject *given, const uint64_t **found, Py_ssize_t group) {
    Py_ssize_t size = PyBytes_GET_SIZE(given), each = group * (Py_ssize_t)sizeof(uint64_t);
    *found = (const uint64_t *)PyBytes_AS_STRING(given);
    if (size % each == 0) return size / each;
    PyErr_SetString(PyExc_ValueError, "numbers of 64 bits, as many as belong together");
    return -1;
}

/* Whether all of a tuple are tuples; false with an error if not. */
static int are_tuples(PyObject *given) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); index++) {
        if (PyTuple_Check(PyTuple_GET_ITEM(given, index))) continue;
        PyErr_SetString(PyExc_TypeError, "a tuple of tuples");
        return 0;
    }
    return 1;
}

/* Whether objects of this type have a word at this place; false with an error if not. */
static int has_word(PyObject *type, int64_t place) {
    if (PyType_Check(type) && place >= (int64_t)sizeof(PyObject) &&
        place <= (int64_t)(((PyTypeObject *)type)->tp_basicsize - (Py_ssize_t)sizeof(uint64_t)))
        return 1;
    PyErr_SetString(PyExc_ValueError, "objects that have no part in C++ at this place");
    return 0;
}

static int no_names(PyObject *names) {
    if (!names || !PyDict_GET_SIZE(names)) return 1;
    PyErr_SetString(PyExc_TypeError, "it takes no named arguments");
    return 0;
}

/* What all of these types begin with. `held` is what they read, which they keep alive: a tuple as a rule. What was
   cleared by Python's collector holds nothing, and says that all is otherwise. */
#define HEAD PyObject_HEAD vectorcallfunc call; PyObject *held;
typedef struct { HEAD } Holder;

static int holder_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Holder *)self)->held);
    return 0;
}

/* What these hold is a tuple: a circle through one ends where something else in it is cleared. */
static int nothing_to_clear(PyObject *self) { return 0; }

static void holder_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(((Holder *)self)->held);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *no_arguments(void) {
    PyErr_SetString(PyExc_TypeError, "it is called without arguments");
    return NULL;
}

/* --- Words: whether words of memory, or halves of such, are what they should be, stage by stage. --- */

/* So many words, or one half if `count` is 0, beginning at an address. Their values follow each other. */
typedef struct { uint64_t address; uint64_t count; } Run;
typedef struct { HEAD Py_ssize_t runs_count, values_count; Run *runs; uint64_t *values; } Words;

static int words_hold(const Words *self) {
    if (!self->held) return 0;
    const uint64_t *wanted = self->values;
    const Run *end = self->runs + self->runs_count;
    for (const Run *run = self->runs; run < end; run++) {
        if (run + AHEAD < end) __builtin_prefetch((const void *)(uintptr_t)run[AHEAD].address);
        if (run->count == 0) {
            uint32_t half;
            memcpy(&half, (const void *)(uintptr_t)run->address, sizeof half);
            if (half != (uint32_t)*wanted++) return 0;
            continue;
        }
        uint64_t differs = 0;
        for (uint64_t index = 0; index < run->count; index++, wanted++)
            differs |= word_at(run->address + index * sizeof(uint64_t)) ^ *wanted;
        if (differs) return 0;
    }
    return 1;
}

/* Room for so many words more. -1 with an error where there is none. */
static int words_grow(Words *self, Py_ssize_t more) {
    Run *runs = PyMem_Realloc(self->runs, (size_t)(self->runs_count + more + 1) * sizeof *runs);
    if (runs) self->runs = runs;
    uint64_t *values = PyMem_Realloc(self->values, (size_t)(self->values_count + more + 1) * sizeof *values);
    if (values) self->values = values;
    if (runs && values) return 0;
    PyErr_NoMemory();
    return -1;
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
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(stages); index++) {
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
        if (words_grow(self, count) < 0) goto failed;
        for (Py_ssize_t one = 0; one < count; one++) {
            Run *last = self->runs + self->runs_count - 1;
            int follows = one && size == 8 && last->address + last->count * sizeof(uint64_t) == where[one];
            if (follows) last->count++;
            else self->runs[self->runs_count++] = (Run){where[one], size == 8};
            self->values[self->values_count++] = what[one];
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int words_clear(PyObject *self) {
    ((Words *)self)->runs_count = 0; /* nothing is read any more of what may be gone */
    Py_CLEAR(((Words *)self)->held);
    return 0;
}

static void words_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    words_clear(self);
    PyMem_Free(((Words *)self)->runs);
    PyMem_Free(((Words *)self)->values);
    Py_TYPE(self)->tp_free(self);
}

/* --- Entries: whether dicts hold the very objects they held, asked of those only that were written since. --- */

static uint64_t writes = 1; /* into any dict that is watched */
static int watcher = -1;

typedef struct { PyObject *dict; uint64_t version; Py_ssize_t size; PyObject *keys, *values, *absent; } Dict;
typedef struct {
    HEAD Py_ssize_t count; Dict *dicts; uint64_t seen; int watched, by_versions, cleared;
    PyObject *lists, *cells, *sets;
} Entries;

#if HAS_WATCHERS
static int written(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    writes++;
    return 0;
}
#endif

static uint64_t version_of(PyObject *dict) {
#if HAS_VERSIONS
    return ((PyDictObject *)dict)->ma_version_tag;
#else
    return 0;
#endif
}

static int dict_holds(const Dict *one) {
    if (one->size >= 0 && PyDict_GET_SIZE(one->dict) != one->size) return 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(one->keys); index++) {
        PyObject *found = PyDict_GetItemWithError(one->dict, PyTuple_GET_ITEM(one->keys, index));
        if (found != PyTuple_GET_ITEM(one->values, index)) return PyErr_Occurred() ? -1 : 0;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(one->absent); index++) {
        int found = PyDict_Contains(one->dict, PyTuple_GET_ITEM(one->absent, index));
        if (found) return found < 0 ? -1 : 0;
    }
    return 1;
}

/* Lists and cells are compared in each call: what stands there is an array of addresses, and one. */
static int others_hold(const Entries *self) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->lists); index++) {
        PyObject *one = PyTuple_GET_ITEM(self->lists, index);
        PyListObject *list = (PyListObject *)PyTuple_GET_ITEM(one, 0);
        PyTupleObject *values = (PyTupleObject *)PyTuple_GET_ITEM(one, 1);
        Py_ssize_t size = Py_SIZE(values);
        if (Py_SIZE(list) != size) return 0;
        if (size && memcmp(list->ob_item, values->ob_item, (size_t)size * sizeof(PyObject *))) return 0;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->cells); index++) {
        PyObject *one = PyTuple_GET_ITEM(self->cells, index);
        if (PyCell_GET(PyTuple_GET_ITEM(one, 0)) != PyTuple_GET_ITEM(one, 1)) return 0;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->sets); index++)
        if (PySet_GET_SIZE(PyTuple_GET_ITEM(self->sets, index))) return 0;
    return 1;
}

static PyObject *entries_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    Entries *self = (Entries *)object;
    if (self->cleared || !others_hold(self)) Py_RETURN_FALSE;
    if (self->watched && self->seen == writes) Py_RETURN_TRUE;
    uint64_t now = writes;
    for (Py_ssize_t index = 0; index < self->count; index++) {
        Dict *one = self->dicts + index;
        uint64_t version = version_of(one->dict);
        if (self->by_versions && version == one->version) continue;
        int holds = dict_holds(one);
        if (holds < 0) return NULL;
        if (!holds) Py_RETURN_FALSE;
        one->version = version;
    }
    self->seen = now;
    Py_RETURN_TRUE;
}

static int entries_clear(PyObject *object) {
    Entries *self = (Entries *)object;
    Py_ssize_t count = self->count;
    self->cleared = 1;
    self->count = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_CLEAR(self->dicts[index].dict);
        Py_CLEAR(self->dicts[index].keys);
        Py_CLEAR(self->dicts[index].values);
        Py_CLEAR(self->dicts[index].absent);
    }
    return 0;
}

/* Whether each of a tuple is a pair of an object of this type and another one, a tuple where `tuples` says so. */
static int are_pairs(PyObject *given, PyTypeObject *type, int tuples) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); index++) {
        PyObject *one = PyTuple_GET_ITEM(given, index);
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 2 || !Py_IS_TYPE(PyTuple_GET_ITEM(one, 0), type)) return 0;
        if (tuples && !PyTuple_CheckExact(PyTuple_GET_ITEM(one, 1))) return 0;
    }
    return 1;
}

static int are_sets(PyObject *given) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); index++)
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(given, index), &PySet_Type)) return 0;
    return 1;
}

/* Entries(((dict, size, keys, values, absent), ...), by_versions, watched, ((list, values), ...), ((cell, value), ...),
   (set, ...)): a size of -1 is any; keys, values and what is absent are tuples; sets are to be empty.
   `by_versions`: a dict whose version is as it was is as it was. `watched`: Python tells when one is written. */
static PyObject *entries_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *given, *lists, *cells, *sets;
    int by_versions, watched;
    if (!no_names(names) ||
        !PyArg_ParseTuple(args, "O!ppO!O!O!", &PyTuple_Type, &given, &by_versions, &watched, &PyTuple_Type, &lists,
                          &PyTuple_Type, &cells, &PyTuple_Type, &sets) ||
        !are_tuples(given))
        return NULL;
    if (!are_pairs(lists, &PyList_Type, 1) || !are_pairs(cells, &PyCell_Type, 0) || !are_sets(sets)) {
        PyErr_SetString(PyExc_TypeError, "lists with tuples of their values, cells with their contents, and sets");
        return NULL;
    }
    Entries *self = (Entries *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = entries_call;
    Py_INCREF(lists), Py_INCREF(cells), Py_INCREF(sets);
    self->lists = lists, self->cells = cells, self->sets = sets;
    self->by_versions = by_versions && HAS_VERSIONS;
    self->watched = watched && watcher >= 0;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    if (!(self->dicts = PyMem_Calloc((size_t)count + 1, sizeof(Dict)))) { PyErr_NoMemory(); goto failed; }
    for (Py_ssize_t index = 0; index < count; index++) {
        Dict one = {0};
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, index), "O!nO!O!O!", &PyDict_Type, &one.dict, &one.size,
                              &PyTuple_Type, &one.keys, &PyTuple_Type, &one.values, &PyTuple_Type, &one.absent))
            goto failed;
        if (PyTuple_GET_SIZE(one.keys) != PyTuple_GET_SIZE(one.values)) {
            PyErr_SetString(PyExc_ValueError, "as many values as keys");
            goto failed;
        }
        one.version = ~(uint64_t)0; /* none: it is compared at first */
        Py_INCREF(one.dict), Py_INCREF(one.keys), Py_INCREF(one.values), Py_INCREF(one.absent);
        self->dicts[self->count++] = one;
#if HAS_WATCHERS
        if (self->watched && PyDict_Watch(watcher, one.dict) < 0) goto failed;
#endif
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int entries_traverse(PyObject *object, visitproc visit, void *arg) {
    Entries *self = (Entries *)object;
    for (Py_ssize_t index = 0; index < self->count; index++) {
        Py_VISIT(self->dicts[index].dict);
        Py_VISIT(self->dicts[index].keys);
        Py_VISIT(self->dicts[index].values);
        Py_VISIT(self->dicts[index].absent);
    }
    Py_VISIT(self->lists);
    Py_VISIT(self->cells);
    Py_VISIT(self->sets);
    return 0;
}

static void entries_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    entries_clear(self);
    Py_CLEAR(((Entries *)self)->lists);
    Py_CLEAR(((Entries *)self)->cells);
    Py_CLEAR(((Entries *)self)->sets);
    PyMem_Free(((Entries *)self)->dicts);
    Py_TYPE(self)->tp_free(self);
}

/* --- Looks: whether tensors look as others did, and where they lie. --- */

typedef struct { PyObject *kind; int64_t item_bytes; int requires_grad; Py_ssize_t start, end; } Look;
typedef struct { int64_t place; uint64_t mask, value; } Masked;
typedef struct {
    int64_t part, storage, autograd, offset, memory, forbidden, history, requires_grad, has_base, base;
} Places;
typedef struct {
    HEAD Py_ssize_t count; Look *looks; Masked *words; Places at; uint64_t forbidden; int distinct;
} Looks;

#define IS_VIEW 0x10000 /* in the word that says whether a tensor requires a gradient */

/* Whether a tensor with this part in C++ does. A view does where the tensor does that it is a view of, which is none. */
static int requires_grad(const Looks *self, uint64_t part) {
    while (part) {
        uint64_t autograd = word_at(part + (uint64_t)self->at.autograd);
        if (!autograd) return 0;
        uint64_t flags = word_at(autograd + (uint64_t)self->at.requires_grad);
        if ((flags & 1) || word_at(autograd + (uint64_t)self->at.history)) return 1;
        if (!(flags & IS_VIEW) || (word_at(autograd + (uint64_t)self->at.has_base) & 0xFF) != 1) return 0;
        part = word_at(autograd + (uint64_t)self->at.base);
    }
    return 0;
}

static int64_t address_of(const Looks *self, const Look *look, PyObject *tensor) {
    if ((PyObject *)Py_TYPE(tensor) != look->kind) return -1;
    uint64_t part = word_at((uint64_t)(uintptr_t)tensor + (uint64_t)self->at.part);
    if (!part) return -1;
    for (const Masked *one = self->words + look->start; one < self->words + look->end; one++)
        if ((word_at(part + (uint64_t)one->place) & one->mask) != one->value) return -1;
    uint64_t storage = word_at(part + (uint64_t)self->at.storage);
    if (requires_grad(self, part) != look->requires_grad || !storage) return -1;
    if (word_at(storage + (uint64_t)self->at.forbidden) & self->forbidden) return -1;
    uint64_t start = word_at(storage + (uint64_t)self->at.memory);
    return start ? (int64_t)(start + word_at(part + (uint64_t)self->at.offset) * (uint64_t)look->item_bytes) : -1;
}

/* A list of where these tensors lie; None where one looks otherwise, or that is not known. */
static PyObject *addresses_of(const Looks *self, PyObject *tensors) {
    if (!self->held || PyList_GET_SIZE(tensors) != self->count) Py_RETURN_NONE;
    PyObject *addresses = PyList_New(self->count);
    if (!addresses) return NULL;
    for (Py_ssize_t index = 0; index < self->count; index++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, index);
        int64_t address = address_of(self, self->looks + index, tensor);
        for (Py_ssize_t other = 0; self->distinct && other < index; other++)
            if (PyList_GET_ITEM(tensors, other) == tensor) address = -1;
        PyObject *number = address < 0 ? NULL : PyLong_FromLongLong(address);
        if (!number) {
            Py_DECREF(addresses);
            if (address < 0) Py_RETURN_NONE;
            return NULL;
        }
        PyList_SET_ITEM(addresses, index, number);
    }
    return addresses;
}

static PyObject *looks_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) == 1 && !names && PyList_Check(args[0])) return addresses_of((Looks *)self, args[0]);
    PyErr_SetString(PyExc_TypeError, "it is called with a list of tensors");
    return NULL;
}

static int looks_clear(PyObject *self) {
    ((Looks *)self)->count = 0;
    Py_CLEAR(((Looks *)self)->held);
    return 0;
}

static void looks_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    looks_clear(self);
    PyMem_Free(((Looks *)self)->looks);
    PyMem_Free(((Looks *)self)->words);
    Py_TYPE(self)->tp_free(self);
}

/* Looks(((class, item_bytes, requires_grad, words), ...), places, forbidden, distinct).

   `words` are bytes of 64 bits each: a place in a tensor's part in C++, a mask, and what stands there under it, and so
   on. `places`: bytes of what `Places` has. `forbidden`: bits of the storage's word there that are not set. `distinct`:
   no tensor stands twice. It gives a list of addresses; None where a tensor looks otherwise, or that is not known. */
static PyObject *looks_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *given, *places;
    unsigned long long forbidden;
    int distinct;
    if (!no_names(names) ||
        !PyArg_ParseTuple(args, "O!SKp", &PyTuple_Type, &given, &places, &forbidden, &distinct) || !are_tuples(given))
        return NULL;
    if (PyBytes_GET_SIZE(places) != sizeof(Places)) {
        PyErr_SetString(PyExc_ValueError, "as many places as there are");
        return NULL;
    }
    Looks *self = (Looks *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = looks_call;
    memcpy(&self->at, PyBytes_AS_STRING(places), sizeof(Places));
    self->forbidden = forbidden;
    self->distinct = distinct;
    Py_INCREF(given);
    self->held = given;
    Py_ssize_t count = PyTuple_GET_SIZE(given), end = 0;
    if (!(self->looks = PyMem_Calloc((size_t)count + 1, sizeof(Look)))) { PyErr_NoMemory(); goto failed; }
    for (Py_ssize_t index = 0; index < count; index++) {
        Look one = {.start = end};
        PyObject *words;
        const uint64_t *numbers;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, index), "OLpS", &one.kind, &one.item_bytes, &one.requires_grad,
                              &words))
            goto failed;
        Py_ssize_t found = numbers_of(words, &numbers, 3);
        if (found < 0 || !has_word(one.kind, self->at.part)) goto failed;
        Masked *all = PyMem_Realloc(self->words, (size_t)(end + found + 1) * sizeof *all);
        if (!all) { PyErr_NoMemory(); goto failed; }
        self->words = all;
        for (Py_ssize_t word = 0; word < found; word++, numbers += 3)
            all[end++] = (Masked){(int64_t)numbers[0], numbers[1], numbers[2]};
        one.end = end;
        self->looks[self->count++] = one;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* --- Nest: the tensors of a call whose arguments are nested like those of another. --- */

enum { TENSOR, SEQUENCE, DICT, VALUE, ASKED, ATTRIBUTES };

/* 1 and the tensors of a value in a list, 0 if it is nested otherwise, -1 with an error. */
static int taken(PyObject *node, PyObject *value, PyObject *found) {
    switch (PyLong_AsLong(PyTuple_GET_ITEM(node, 0))) {
    case TENSOR:
        return PyList_Append(found, value) < 0 ? -1 : 1;
    case SEQUENCE: {
        PyObject *members = PyTuple_GET_ITEM(node, 2);
        Py_ssize_t size = PyTuple_GET_SIZE(members);
        if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(node, 1)) return 0;
        int is_list = PyList_CheckExact(value);
        for (Py_ssize_t index = 0; index < size; index++) { /* what is asked may be Python, and change a list */
            if (Py_SIZE(value) != size) return 0;
            PyObject *one = is_list ? PyList_GET_ITEM(value, index) : PyTuple_GET_ITEM(value, index);
            Py_INCREF(one);
            int fits = taken(PyTuple_GET_ITEM(members, index), one, found);
            Py_DECREF(one);
            if (fits <= 0) return fits;
        }
        return Py_SIZE(value) == size;
    }
    case DICT: {
        PyObject *keys = PyTuple_GET_ITEM(node, 1), *members = PyTuple_GET_ITEM(node, 2), *key, *one;
        Py_ssize_t size = PyTuple_GET_SIZE(keys), place = 0, index = 0;
        if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != size) return 0;
        while (index < size && PyDict_Next(value, &place, &key, &one)) {
            PyObject *wanted = PyTuple_GET_ITEM(keys, index);
            if (key != wanted && (!PyUnicode_CheckExact(key) || PyUnicode_Compare(key, wanted))) return 0;
            Py_INCREF(one);
            int fits = taken(PyTuple_GET_ITEM(members, index++), one, found);
            Py_DECREF(one);
            if (fits <= 0) return fits;
        }
        return index == size;
    }
    case ATTRIBUTES: {
        PyObject *keys = PyTuple_GET_ITEM(node, 2), *members = PyTuple_GET_ITEM(node, 3);
        if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(node, 1)) return 0;
        for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(keys); index++) {
            PyObject *one = PyObject_GetAttr(value, PyTuple_GET_ITEM(keys, index));
            int fits = one ? taken(PyTuple_GET_ITEM(members, index), one, found) : -1;
            Py_XDECREF(one);
            if (fits <= 0) return fits;
        }
        return 1;
    }
    case VALUE: {
        PyObject *wanted = PyTuple_GET_ITEM(node, 1);
        if (value == wanted) return 1;
        return Py_TYPE(value) == Py_TYPE(wanted) ? PyObject_RichCompareBool(value, wanted, Py_EQ) : 0;
    }
    default: {
        PyObject *fits = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(node, 1), value, found, NULL);
        int is_so = fits ? PyObject_IsTrue(fits) : -1;
        Py_XDECREF(fits);
        return is_so;
    }
    }
}

/* nest(args, kwargs): a list of the tensors, None where they are nested otherwise. */
static PyObject *nest_call(PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) != 2 || names) {
        PyErr_SetString(PyExc_TypeError, "it is called with the positional and the named arguments of a call");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    if (!found) return NULL;
    for (int index = 0; index < 2; index++) {
        int fits = taken(PyTuple_GET_ITEM(((Holder *)self)->held, index), args[index], found);
        if (fits > 0) continue;
        Py_DECREF(found);
        if (fits < 0) return NULL;
        Py_RETURN_NONE;
    }
    return found;
}

/* Whether a tuple says of each place in a nest what has to stand there, as `taken` reads it. */
static int is_nest(PyObject *node) {
    if (!PyTuple_CheckExact(node) || !PyTuple_GET_SIZE(node) || !PyLong_CheckExact(PyTuple_GET_ITEM(node, 0))) return 0;
    long kind = PyLong_AsLong(PyTuple_GET_ITEM(node, 0));
    if (kind == TENSOR) return PyTuple_GET_SIZE(node) == 1;
    if (kind == VALUE || kind == ASKED) return PyTuple_GET_SIZE(node) == 2;
    if (kind != SEQUENCE && kind != DICT && kind != ATTRIBUTES) return 0;
    if (PyTuple_GET_SIZE(node) != (kind == ATTRIBUTES ? 4 : 3)) return 0;
    PyObject *first = PyTuple_GET_ITEM(node, 1), *members = PyTuple_GET_ITEM(node, kind == ATTRIBUTES ? 3 : 2);
    PyObject *keys = kind == ATTRIBUTES ? PyTuple_GET_ITEM(node, 2) : kind == DICT ? first : NULL;
    if (!PyTuple_CheckExact(members)) return 0;
    if (kind == SEQUENCE && first != (PyObject *)&PyTuple_Type && first != (PyObject *)&PyList_Type) return 0;
    if (keys && (!PyTuple_CheckExact(keys) || PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(members))) return 0;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(members); index++) {
        if (keys && !PyUnicode_CheckExact(PyTuple_GET_ITEM(keys, index))) return 0;
        if (!is_nest(PyTuple_GET_ITEM(members, index))) return 0;
    }
    return 1;
}

/* Nest(args, kwargs): (TENSOR,), (SEQUENCE, list or tuple, members), (DICT, keys, members) of an exact dict,
   (VALUE, value), (ATTRIBUTES, class, names, members), or (ASKED, function of a value and a list, which appends its
   tensors and says whether it fits). */
static PyObject *nest_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *positional, *named;
    if (!no_names(names) || !PyArg_ParseTuple(args, "OO", &positional, &named)) return NULL;
    if (!is_nest(positional) || !is_nest(named)) {
        PyErr_SetString(PyExc_TypeError, "what stands in each place of the arguments, as tuples");
        return NULL;
    }
    Holder *self = (Holder *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = nest_call;
    if (!(self->held = PyTuple_Pack(2, positional, named))) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* --- Follower: leads kernels of an executable graph to where inputs lie. --- */

typedef int (*SetParameters)(void *executable, void *node, const void *parameters);
typedef struct { Py_ssize_t index, first, end; uint64_t below_alignment, size; } Followed;
typedef struct { uint64_t where; int64_t delta; Py_ssize_t update; } Cell;
typedef struct { uint64_t node, parameters; int concerned; } Update;
typedef struct {
    HEAD Py_ssize_t inputs_count, updates_count, borders_count; Followed *inputs; Cell *cells; Update *updates;
    uint64_t *borders, executable; SetParameters set;
} Follower;

/* How many borders are below an address, or at it where `inclusive`. They ascend. */
static Py_ssize_t below(const Follower *self, uint64_t address, int inclusive) {
    Py_ssize_t low = 0, high = self->borders_count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        uint64_t border = self->borders[middle];
        if (border < address || (inclusive && border == address)) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int is_readable(const Follower *self, const Followed *one, uint64_t address) {
    Py_ssize_t begin = below(self, address, 1);
    return !(address & one->below_alignment) && !(begin & 1) && below(self, address + one->size, 0) == begin;
}

/* The number of a list. -1 with an error where there is none. */
static int number_at(PyObject *list, Py_ssize_t index, uint64_t *number) {
    if (index >= PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_IndexError, "fewer addresses than inputs");
        return -1;
    }
    *number = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, index));
    return PyErr_Occurred() ? -1 : 0;
}

/* Where an input is read from now on, in the caller's list; 0 while that is not known. */
static int note(PyObject *now, Py_ssize_t index, uint64_t address) {
    PyObject *number = PyLong_FromUnsignedLongLong(address);
    return number ? PyList_SetItem(now, index, number) : -1;
}

/* follower(addresses, now): both are lists by index. It gives how many bytes were set; -1, and nothing was done, where
   one cannot be read where it lies. `now` has what is set then. Where the driver fails, it raises its code. */
static PyObject *follower_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    Follower *self = (Follower *)object;
    if (PyVectorcall_NARGS(count) != 2 || names || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "it is called with a list of addresses and one of those that are set");
        return NULL;
    }
    Py_ssize_t cells_set = 0;
    uint64_t address, set;
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || number_at(args[1], one->index, &set) < 0) return NULL;
        if (address != set && !is_readable(self, one, address)) return PyLong_FromLong(-1);
    }
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || number_at(args[1], one->index, &set) < 0) return NULL;
        if (address == set) continue;
        if (note(args[1], one->index, 0) < 0) return NULL;
        for (Cell *cell = self->cells + one->first; cell < self->cells + one->end; cell++, cells_set++) {
            uint64_t value = address + (uint64_t)cell->delta;
            memcpy((void *)(uintptr_t)cell->where, &value, sizeof value);
            self->updates[cell->update].concerned = 1;
        }
    }
    if (!cells_set) return PyLong_FromLong(0);
    int code = 0;
    for (Update *one = self->updates; one < self->updates + self->updates_count; one++) {
        if (!one->concerned) continue;
        one->concerned = 0;
        if (!code)
            code = self->set((void *)(uintptr_t)self->executable, (void *)(uintptr_t)one->node,
                             (const void *)(uintptr_t)one->parameters);
    }
    if (code) return PyErr_Format(PyExc_RuntimeError, "%d", code);
    for (const Followed *one = self->inputs; one < self->inputs + self->inputs_count; one++) {
        if (number_at(args[0], one->index, &address) < 0 || note(args[1], one->index, address) < 0) return NULL;
    }
    return PyLong_FromSsize_t(cells_set * (Py_ssize_t)sizeof(uint64_t));
}

static void follower_free(PyObject *object) {
    Follower *self = (Follower *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->held);
    PyMem_Free(self->inputs);
    PyMem_Free(self->cells);
    PyMem_Free(self->updates);
    PyMem_Free(self->borders);
    Py_TYPE(object)->tp_free(object);
}

/* A copy of the bytes, with room for one more. NULL with an error where there is no memory. */
static void *copy_of(PyObject *bytes) {
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    void *copy = PyMem_Calloc(1, size + sizeof(Followed));
    if (!copy) return PyErr_NoMemory();
    memcpy(copy, PyBytes_AS_STRING(bytes), size);
    return copy;
}

/* Follower(held, executable, function, inputs, cells, updates, borders): the driver's function that sets the parameters
   of a kernel in an executable graph; the others are bytes of 64 bits each. Of an input its index, its first cell and
   the one behind its last, bits that its address must not have, and its size; of a cell where it is, what is added to
   the address, and its update; of an update the node, and the parameters of its launch. Between each two borders lies
   memory that the graph writes. */
static PyObject *follower_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *held, *inputs, *cells, *updates, *borders;
    unsigned long long executable, function;
    if (!PyArg_ParseTuple(args, "OKKSSSS", &held, &executable, &function, &inputs, &cells, &updates, &borders))
        return NULL;
    Follower *self = (Follower *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = follower_call;
    self->executable = executable;
    self->set = (SetParameters)(uintptr_t)function;
    Py_INCREF(held);
    self->held = held;
    const uint64_t *numbers;
    Py_ssize_t cells_count = numbers_of(cells, &numbers, 3);
    self->inputs_count = numbers_of(inputs, &numbers, 5);
    self->borders_count = numbers_of(borders, &numbers, 1);
    self->updates_count = numbers_of(updates, &numbers, 2);
    if (cells_count < 0 || self->inputs_count < 0 || self->borders_count < 0 || self->updates_count < 0) goto failed;
    if (!(self->inputs = copy_of(inputs)) || !(self->cells = copy_of(cells)) || !(self->borders = copy_of(borders)))
        goto failed;
    if (!(self->updates = PyMem_Calloc((size_t)self->updates_count + 1, sizeof(Update)))) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t index = 0; index < self->updates_count; index++)
        self->updates[index] = (Update){numbers[2 * index], numbers[2 * index + 1], 0};
    int fits = function != 0;
    for (Py_ssize_t index = 0; index < self->inputs_count; index++) {
        Followed one = self->inputs[index];
        fits &= one.index >= 0 && 0 <= one.first && one.first <= one.end && one.end <= cells_count;
    }
    for (Py_ssize_t index = 0; index < cells_count; index++)
        fits &= 0 <= self->cells[index].update && self->cells[index].update < self->updates_count;
    if (fits) return (PyObject *)self;
    PyErr_SetString(PyExc_ValueError, "inputs have cells, and cells have updates, that are there; and a function");
failed:
    Py_DECREF(self);
    return NULL;
}

/* --- Versions: counts up the versions of tensors. --- */

typedef struct { HEAD Py_ssize_t part, counter, version; } Versions;

static PyObject *versions_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    Versions *self = (Versions *)object;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(self->held); index++) {
        uint64_t tensor = (uint64_t)(uintptr_t)PyTuple_GET_ITEM(self->held, index);
        uint64_t part = word_at(tensor + (uint64_t)self->part);
        uint64_t counter = part ? word_at(part + (uint64_t)self->counter) : 0;
        if (counter) __atomic_fetch_add((uint32_t *)(uintptr_t)(counter + (uint64_t)self->version), 1, __ATOMIC_SEQ_CST);
    }
    Py_RETURN_NONE;
}

/* Versions(tensors, part, counter, version): where an object has its part in C++, that its counter, and that its count.
   What has no counter counts none. */
static PyObject *versions_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *tensors;
    Py_ssize_t part, counter, version;
    if (!no_names(names) || !PyArg_ParseTuple(args, "O!nnn", &PyTuple_Type, &tensors, &part, &counter, &version))
        return NULL;
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tensors); index++)
        if (!has_word((PyObject *)Py_TYPE(PyTuple_GET_ITEM(tensors, index)), part)) return NULL;
    Versions *self = (Versions *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = versions_call;
    self->part = part, self->counter = counter, self->version = version;
    Py_INCREF(tensors);
    self->held = tensors;
    return (PyObject *)self;
}

/* --- Settings: whether functions give what they gave. --- */

static PyObject *settings_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    if (PyVectorcall_NARGS(count) || names) return no_arguments();
    PyObject *functions = PyTuple_GET_ITEM(((Holder *)object)->held, 0);
    PyObject *values = PyTuple_GET_ITEM(((Holder *)object)->held, 1);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(functions); index++) {
        PyObject *found = PyObject_CallNoArgs(PyTuple_GET_ITEM(functions, index));
        if (!found) return NULL;
        PyObject *wanted = PyTuple_GET_ITEM(values, index);
        int same = found == wanted;
        if (!same && Py_TYPE(found) == Py_TYPE(wanted)) same = PyObject_RichCompareBool(found, wanted, Py_EQ);
        Py_DECREF(found);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Settings(functions, values): tuples of the same length. */
static PyObject *settings_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *functions, *values;
    if (!no_names(names) || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &functions, &PyTuple_Type, &values))
        return NULL;
    if (PyTuple_GET_SIZE(functions) != PyTuple_GET_SIZE(values)) {
        PyErr_SetString(PyExc_ValueError, "as many values as functions");
        return NULL;
    }
    Holder *self = (Holder *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = settings_call;
    if (!(self->held = PyTuple_Pack(2, functions, values))) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

#define TYPE(variable, name, structure, make, clear, traverse, release)                                             \
    static PyTypeObject variable = {                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "encore_looks." name,                                               \
        .tp_basicsize = sizeof(structure),                                                                           \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,                            \
        .tp_vectorcall_offset = offsetof(Holder, call),                                                              \
        .tp_call = PyVectorcall_Call,                                                                                \
        .tp_new = make,                                                                                              \
        .tp_traverse = traverse,                                                                                     \
        .tp_clear = clear,                                                                                           \
        .tp_dealloc = release,                                                                                       \
    }

TYPE(words_type, "Words", Words, words_new, words_clear, holder_traverse, words_free);
TYPE(entries_type, "Entries", Entries, entries_new, entries_clear, entries_traverse, entries_free);
TYPE(looks_type, "Looks", Looks, looks_new, looks_clear, holder_traverse, looks_free);
TYPE(settings_type, "Settings", Holder, settings_new, nothing_to_clear, holder_traverse, holder_free);
TYPE(nest_type, "Nest", Holder, nest_new, nothing_to_clear, holder_traverse, holder_free);
TYPE(follower_type, "Follower", Follower, follower_new, nothing_to_clear, holder_traverse, follower_free);
TYPE(versions_type, "Versions", Versions, versions_new, nothing_to_clear, holder_traverse, holder_free);

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "encore_looks", .m_size = -1};

PyMODINIT_FUNC PyInit_encore_looks(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyTypeObject *types[] = {&words_type, &entries_type, &looks_type, &settings_type, &nest_type, &follower_type,
                             &versions_type};
    for (size_t index = 0; index < sizeof types / sizeof *types; index++) {
        if (PyModule_AddType(module, types[index]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
#if HAS_WATCHERS
    watcher = PyDict_AddWatcher(written);
    if (watcher < 0) PyErr_Clear(); /* all are taken: dicts are asked one by one */
#endif
    return module;
}
