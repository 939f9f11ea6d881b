/* What stands under keys of dicts, and other values put there: one call for all of them. */

static PyObject *values_at(PyObject *places) {
    Py_ssize_t count = PyTuple_GET_SIZE(places), others = 0;
    PyObject *values = PyList_New(count);
    for (Py_ssize_t index = 0; values && index < count; index++) {
        PyObject *place = PyTuple_GET_ITEM(places, index);
        PyObject *found = PyDict_GetItemWithError(PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1));
        if (!found && PyErr_Occurred()) {
            Py_CLEAR(values);
            break;
        }
        PyList_SET_ITEM(values, index, Py_NewRef(found ? found : Py_None));
        others += PyList_GET_ITEM(values, index) != PyList_GET_ITEM(values, 0);
    }
    if (values && count && !others && PyList_SetSlice(values, 1, count, NULL) < 0) Py_CLEAR(values);
    return values;
}

static PyObject *bound_call(PyObject *object, PyObject *const *args, size_t count, PyObject *names) {
    PyObject *places = ((Holder *)object)->held;
    if (!PyVectorcall_NARGS(count) && !names) return values_at(places);
    if (PyVectorcall_NARGS(count) != 1 || names || !PyTuple_CheckExact(args[0]) ||
        PyTuple_GET_SIZE(args[0]) != PyTuple_GET_SIZE(places)) {
        PyErr_SetString(PyExc_TypeError, "it is called without arguments, or with a tuple of a value for each place");
        return NULL;
    }
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(places); index++) {
        PyObject *place = PyTuple_GET_ITEM(places, index);
        PyObject *value = PyTuple_GET_ITEM(args[0], index);
        if (PyDict_SetItem(PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1), value) < 0) return NULL;
    }
    Py_RETURN_NONE;
}

/* Bound(((dict, key), ...)): called without arguments it gives a list of what stands there, None where nothing does, and
   of one value where all hold the same; called with a tuple of values it puts them there. */
static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    PyObject *places;
    if (!no_names(names) || !PyArg_ParseTuple(args, "O!", &PyTuple_Type, &places)) return NULL;
    if (!are_pairs(places, &PyDict_Type, 0)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of pairs of a dict and a key");
        return NULL;
    }
    Holder *self = (Holder *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = bound_call;
    self->held = Py_NewRef(places);
    return (PyObject *)self;
}
