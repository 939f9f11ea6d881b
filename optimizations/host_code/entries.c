/* Whether dicts hold the very objects they held, asked of those only that were written since. */

/* What 3.12 called the version of a dict left with 3.14. */
#define HAS_VERSIONS (PY_VERSION_HEX < 0x030E0000)

/* `interned`: all keys, and those absent, are strings of which there is one each. `before`: another place with the same dict, or -1. */
typedef struct {
    PyObject *dict; uint64_t version; Py_ssize_t size, before; PyObject *keys, *values, *absent; int interned;
} Dict;
typedef struct {
    HEAD Py_ssize_t count; Dict *dicts; Table table; uint64_t seen; int watched, by_versions, cleared;
    PyObject *lists, *cells, *sets;
} Entries;

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

/* Where this very object stands in a tuple, -1 if it does not. */
static Py_ssize_t index_of(PyObject *tuple, PyObject *object) {
    Py_ssize_t index = PyTuple_GET_SIZE(tuple);
    while (--index >= 0 && PyTuple_GET_ITEM(tuple, index) != object) {}
    return index;
}

/* Whether one still holds what it held behind a write, if it did before. A key that is not compared decides nothing.
   Python 3.12 tells of a key that is new as of one with another value, where other objects of its class have it. */
static int holds_behind(const Dict *one, PyObject *key) {
    if (!key || !one->interned) return dict_holds(one);
    if (one->size >= 0 && PyDict_GET_SIZE(one->dict) != one->size) return 0;
    Py_ssize_t index = index_of(one->keys, key);
    PyObject *expected = index >= 0 ? PyTuple_GET_ITEM(one->values, index) : NULL;
    if (!expected && index_of(one->absent, key) < 0) return 1;
    PyObject *found = PyDict_GetItemWithError(one->dict, key);
    return !found && PyErr_Occurred() ? -1 : found == expected;
}

/* Whether what was written since they were compared leaves all as it was: only that is looked at. */
static int hold_behind_writes(const Entries *self, uint64_t now) {
    for (uint64_t at = self->seen; at != now; at++) {
        Write *one = last_writes + at % REMEMBERED;
        for (Py_ssize_t place = place_of(&self->table, one->dict); place >= 0; place = self->dicts[place].before) {
            int holds = holds_behind(self->dicts + place, one->key);
            if (holds <= 0) return holds;
        }
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
    uint64_t now = writes;
    if (self->watched && self->seen && now - self->seen <= REMEMBERED) {
        int hold = hold_behind_writes(self, now);
        if (hold < 0) return NULL;
        if (!hold) Py_RETURN_FALSE;
        if (writes - self->seen <= REMEMBERED) { /* the log has them still: comparing keys may run what writes */
            self->seen = now;
            Py_RETURN_TRUE;
        }
    }
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
    if (!table_made(&self->table, count)) goto failed;
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
        one.interned = are_interned(one.keys) && are_interned(one.absent);
        one.before = place_of(&self->table, one.dict);
        place_at(&self->table, one.dict, self->count);
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
    PyMem_Free(((Entries *)self)->table.slots);
    Py_TYPE(self)->tp_free(self);
}
