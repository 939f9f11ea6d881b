/* What all of these files use. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

/* Whether each of a tuple is a pair of an object of this type and another one, a tuple where `tuples` says so. */
static int are_pairs(PyObject *given, PyTypeObject *type, int tuples) {
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); index++) {
        PyObject *one = PyTuple_GET_ITEM(given, index);
        if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 2 || !Py_IS_TYPE(PyTuple_GET_ITEM(one, 0), type)) return 0;
        if (tuples && !PyTuple_CheckExact(PyTuple_GET_ITEM(one, 1))) return 0;
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

/* One that is called by this function and holds a tuple of these two. NULL with an error where there is no memory. */
static PyObject *holder_of_two(PyTypeObject *type, vectorcallfunc call, PyObject *first, PyObject *second) {
    Holder *self = (Holder *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = call;
    if ((self->held = PyTuple_Pack(2, first, second))) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyObject *no_arguments(void) {
    PyErr_SetString(PyExc_TypeError, "it is called without arguments");
    return NULL;
}
