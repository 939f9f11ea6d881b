/* Whether tensors look as others did, and where they lie. */

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
