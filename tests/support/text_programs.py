"""Programs that read a value through texts, copies, methods of PyTorch that call their own, and late objects."""

from __future__ import annotations

from name_programs import read

MORE_LOOKUPS: dict[str, str] = {}

MORE_LOOKUPS["class body local"] = read(
    """
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

class X:
    pass
one = X()
one.step = 2.0

def weigh(b):
    optimizer.step()

    class A:
        optimizer = one
        y = optimizer.step.real
    return A.y
""",
    """one.step += 1""",
)

MORE_LOOKUPS["class body local call"] = read(
    """
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
F = {'w': 2.0}

class X:

    def step(self):
        return F['w']
one = X()

def weigh(b):
    optimizer.step()

    class A:
        optimizer = one
        y = optimizer.step()
    return A.y
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["f-string of a dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float(f'{c}'.split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["percent dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float(('%s' % c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["percent dataclass tuple"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float(('%s' % (c,)).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["format dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float('{}'.format(c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["format() dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float(format(c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["print dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
import io

def weigh(b):
    s = io.StringIO()
    print(c, file=s)
    return float(s.getvalue().split('=')[1][:-2])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["str in map alias"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
S = str

def weigh(b):
    return float(S(c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["pickle dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
import pickle

def weigh(b):
    return float(sum(pickle.dumps(c)))
""",
    """c.w += 1""",
)

MORE_LOOKUPS["pprint dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
import pprint

def weigh(b):
    return float(pprint.pformat(c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["ascii dataclass"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return float(ascii(c).split('=')[1][:-1])
""",
    """c.w += 1""",
)

MORE_LOOKUPS["eq under another name"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
from operator import eq as same

def weigh(b):
    return 2.0 if same(c, d) else 5.0
""",
    """c.w += 1""",
)

MORE_LOOKUPS["groupby"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
import itertools

def weigh(b):
    return 1.0 + len(list(itertools.groupby([c, d])))
""",
    """c.w = 2.0 if c.w == 3.0 else 3.0""",
)

MORE_LOOKUPS["index by getattr"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
L = [d]

def weigh(b):
    try:
        return 2.0 + getattr(L, 'index')(c)
    except ValueError:
        return 9.0
""",
    """c.w = 2.0 if c.w == 3.0 else 3.0""",
)

MORE_LOOKUPS["index held"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
L = [d]
I = L.index

def weigh(b):
    try:
        return 2.0 + I(c)
    except ValueError:
        return 9.0
""",
    """c.w = 2.0 if c.w == 3.0 else 3.0""",
)

MORE_LOOKUPS["counter methodataclassaller held"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
import operator
L = [d]
M = operator.methodcaller('count', c)

def weigh(b):
    return 2.0 + M(L)
""",
    """c.w = 2.0 if c.w == 3.0 else 3.0""",
)

MORE_LOOKUPS["unittest eq"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
import unittest
T = unittest.TestCase()

def weigh(b):
    try:
        T.assertEqual(c, d)
    except AssertionError:
        return 9.0
    return 2.0
""",
    """c.w = 2.0 if c.w == 3.0 else 3.0""",
)

MORE_LOOKUPS["partial eq"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()
d = C()
import functools
from operator import eq as q
f = functools.partial(q, c)

def weigh(b):
    return 2.0 if f(d) else 5.0
""",
    """c.w += 1""",
)

MORE_LOOKUPS["own str f"] = read(
    """
class C:

    def __str__(s):
        return str(s.w)
c = C()
c.w = 2.0

def weigh(b):
    return float(f'{c}')
""",
    """c.w += 1""",
)

MORE_LOOKUPS["own str %"] = read(
    """
class C:

    def __str__(s):
        return str(s.w)
c = C()
c.w = 2.0

def weigh(b):
    return float('%s' % c)
""",
    """c.w += 1""",
)

MORE_LOOKUPS["own repr"] = read(
    """
class C:

    def __repr__(s):
        return str(s.w)
c = C()
c.w = 2.0

def weigh(b):
    return float(repr(c))
""",
    """c.w += 1""",
)

MORE_LOOKUPS["own str join"] = read(
    """
class C:

    def __str__(s):
        return str(s.w)
c = C()
c.w = 2.0

def weigh(b):
    return float(''.join(map(str, [c])))
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key attrgetter"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return operator.attrgetter(KEY)(c)
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key getattribute"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return c.__getattribute__(KEY)
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key static"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return inspect.getattr_static(c, KEY)
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key builtins"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return builtins.getattr(c, KEY)
""",
    """c.w += 1""",
)

MORE_LOOKUPS["okey builtins"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'step'
UP = 'STEP'
FMT = '{0.step}'
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

class C:
    pass
c = C()
c.step = 2.0

def weigh(b):
    optimizer.step()
    return builtins.getattr(c, KEY)
""",
    """c.step += 1""",
)

MORE_LOOKUPS["key format"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return float(FMT.format(c))
""",
    """c.w += 1""",
)

MORE_LOOKUPS["okey format"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'step'
UP = 'STEP'
FMT = '{0.step}'
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

class C:
    pass
c = C()
c.step = 2.0

def weigh(b):
    optimizer.step()
    return float(FMT.format(c))
""",
    """c.step += 1""",
)

MORE_LOOKUPS["okey formatter"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'step'
UP = 'STEP'
FMT = '{0.step}'
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

class C:
    pass
c = C()
c.step = 2.0

def weigh(b):
    optimizer.step()
    return float(string.Formatter().vformat(FMT, (c,), {}))
""",
    """c.step += 1""",
)

MORE_LOOKUPS["key get_field"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return string.Formatter().get_field('0.' + KEY, (c,), {})[0]
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key reduce_ex"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return c.__reduce_ex__(2)[2][KEY]
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key getstate"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return c.__getstate__()[KEY]
""",
    """c.w += 1""",
)

MORE_LOOKUPS["key members"] = read(
    """
import operator, inspect, builtins, functools, copy, string
KEY = 'w'
UP = 'W'
FMT = '{0.w}'

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return dict(inspect.getmembers(c))[KEY]
""",
    """c.w += 1""",
)

MORE_LOOKUPS["dataclass asdict eq=False"] = read(
    """
import dataclasses as D, inspect
KEY = 'w'

@D.dataclass(eq=False)
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return D.asdict(c)[KEY]
""",
    """c.w += 1""",
)

MORE_LOOKUPS["import_module dotted"] = read(
    """
import sys, types
p = types.ModuleType('ppkg')
p.__path__ = []
s = types.ModuleType('ppkg.conf')
s.rate = 2.0
p.conf = s
sys.modules['ppkg'] = p
sys.modules['ppkg.conf'] = s
import importlib

def weigh(b):
    return importlib.import_module('ppkg.conf').rate
""",
    """s.rate += 1""",
)

MORE_LOOKUPS["sysmodules dotted"] = read(
    """
import sys, types
p = types.ModuleType('ppkg')
p.__path__ = []
s = types.ModuleType('ppkg.conf')
s.rate = 2.0
p.conf = s
sys.modules['ppkg'] = p
sys.modules['ppkg.conf'] = s

def weigh(b):
    return sys.modules['ppkg.conf'].rate
""",
    """s.rate += 1""",
)

MORE_LOOKUPS["__import__ fromlist"] = read(
    """
import sys, types
p = types.ModuleType('ppkg')
p.__path__ = []
s = types.ModuleType('ppkg.conf')
s.rate = 2.0
p.conf = s
sys.modules['ppkg'] = p
sys.modules['ppkg.conf'] = s

def weigh(b):
    return __import__('ppkg.conf', fromlist=['rate']).rate
""",
    """s.rate += 1""",
)

MORE_LOOKUPS["relative import"] = read(
    """
import sys, types
p = types.ModuleType('ppkg')
p.__path__ = []
s = types.ModuleType('ppkg.conf')
s.rate = 2.0
p.conf = s
sys.modules['ppkg'] = p
sys.modules['ppkg.conf'] = s
exec('def weigh(b):\\n    from .conf import rate\\n    return rate\\n', vars(p) | {'__package__': 'ppkg'}, (G := {}))
weigh = G['weigh']
""",
    """s.rate += 1""",
)

MORE_LOOKUPS["relative import2"] = read(
    """
import sys, types
p = types.ModuleType('ppkg')
p.__path__ = []
s = types.ModuleType('ppkg.conf')
s.rate = 2.0
p.conf = s
sys.modules['ppkg'] = p
sys.modules['ppkg.conf'] = s
exec('def weigh(b):\\n    from . import conf\\n    return conf.rate\\n', {'__package__': 'ppkg'}, (G := {}))
weigh = G['weigh']
""",
    """s.rate += 1""",
)

MORE_LOOKUPS["module train patched"] = read(
    """
import types

class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.buf = torch.ones(())

    def forward(s, x):
        return s.buf * x
inner = M()
F = {'w': 2.0}

def tr(mode=True):
    inner.buf.fill_(F['w'])
    return inner
inner.train = tr
model = nn.Sequential(inner)

def weigh(b):
    model.train()
    return model(torch.ones(()))
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["own child train patched"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):
    pass
inner = N()

class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.inner = inner

    def forward(s, x):
        return x

def tr(mode=True):
    buf.fill_(F['w'])
    return inner
inner.train = tr
model = M()

def weigh(b):
    model.train()
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["own child train patched from eval"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):
    pass
inner = N()

class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.inner = inner

    def forward(s, x):
        return x

def tr(mode=True):
    buf.fill_(F['w'])
    return inner
inner.train = tr
model = M()

def weigh(b):
    model.eval()
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["child train override from eval"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):

    def train(s, mode=True):
        buf.fill_(F['w'])
        return s
inner = N()
model = nn.Sequential(inner)

def weigh(b):
    model.eval()
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["parameters override in zero_grad"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):

    def parameters(s, recurse=True):
        buf.fill_(F['w'])
        return super().parameters(recurse)
model = N()

def weigh(b):
    model.zero_grad()
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["named_parameters override in parameters"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):

    def named_parameters(s, *a, **k):
        buf.fill_(F['w'])
        return super().named_parameters(*a, **k)
model = N()

def weigh(b):
    list(model.parameters())
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["get_extra_state"] = read(
    """
buf = torch.ones(())
F = {'w': 2.0}

class N(nn.Module):

    def get_extra_state(s):
        buf.fill_(F['w'])
        return {}
model = N()

def weigh(b):
    model.state_dict()
    return buf * 1
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["F function patched called"] = read(
    """
W = {'w': 2.0}
import torch.nn.functional as FF

def mine(x, *a, **k):
    return x * W['w']
FF.a_function_of_this_program = mine

def weigh(b):
    return FF.a_function_of_this_program(torch.ones(()))
""",
    """W['w'] += 1""",
)

MORE_LOOKUPS["F function patched via torch.nn"] = read(
    """
W = {'w': 2.0}
import torch.nn.functional as FF

def mine(x, *a, **k):
    return x * W['w']
FF.a_function_of_this_program = mine

def weigh(b):
    return torch.nn.functional.a_function_of_this_program(torch.ones(()))
""",
    """W['w'] += 1""",
)

MORE_LOOKUPS["a class method makes one"] = read(
    """
G = {'w': 2.0}

class F:

    def __init__(s):
        s.w = G['w']

    @classmethod
    def make(cls):
        return cls()
one = F()

def weigh(b):
    return one.make().w
""",
    """G['w'] += 1""",
)

MORE_LOOKUPS["a class method makes one with another optimizer"] = read(
    """
class X:
    pass
x = X()
x.step = 2.0
H = {'x': x}

class F:

    def __init__(s, o):
        s.optimizer = o

    @classmethod
    def make(cls, o):
        return cls(o)

    def weigh(s):
        return (s.optimizer.step.real, s.optimizer.step)[1]
one = F(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
F2 = F
one2 = one
del F2

def weigh(b):
    return one.make(H['x']).weigh2()

def weigh2(s):
    return s.optimizer.step.real
F.weigh2 = weigh2
""",
    """x.step += 1""",
)

MORE_LOOKUPS["late second object"] = read(
    """
class X:
    pass
fake = X()
fake.step = 2.0

class T:
    optimizer = fake

    def w(self):
        return self.optimizer.step.real if self.go() else 1.0

    def go(self):
        return True
a = T()
a.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
a.go = lambda: False
b2 = T()

class L:
    pass
l0 = L()
l0.n1 = L()
l0.n1.n2 = L()
l0.n1.n2.n3 = b2

def weigh(b):
    return a.w() * l0.n1.n2.n3.w()
""",
    """fake.step += 1""",
)

MORE_LOOKUPS["late second object call"] = read(
    """
G = {'w': 2.0}

class X:

    def step(s):
        return G['w']
fake = X()

class T:
    optimizer = fake

    def w(self):
        return self.optimizer.step() or 1.0
a = T()
a.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
b2 = T()

class L:
    pass
l0 = L()
l0.n1 = L()
l0.n1.n2 = L()
l0.n1.n2.n3 = b2

def weigh(b):
    return a.w() * l0.n1.n2.n3.w()
""",
    """G['w'] += 1""",
)

MORE_LOOKUPS["late by property"] = read(
    """
class X:
    pass
fake = X()
fake.step = 2.0

class T:
    optimizer = fake

    def w(self):
        return self.optimizer.step.real if self.ok else 1.0

    @property
    def ok(self):
        return self is not a
a = T()
a.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
b2 = T()

class P:

    @property
    def q(self):
        return self.r.t
p = P()
p.r = P()
p.r.t = b2

def weigh(b):
    return a.w() * p.q.w()
""",
    """fake.step += 1""",
)

MORE_LOOKUPS["defaultdict factory"] = read(
    """
import collections
F = {'w': 2.0}
d = collections.defaultdict(lambda: F['w'])

def weigh(b):
    r = d['x']
    d.pop('x')
    return r
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["default_factory call"] = read(
    """
import collections
F = {'w': 2.0}
d = collections.defaultdict(lambda: F['w'])

def weigh(b):
    return d.default_factory()
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["torch attr"] = read(
    """
class Z:
    pass
z = Z()
z.train = 2.0
torch.zz_of_this_program = z
m = nn.Bilinear(1, 1, 1)

def weigh(b):
    m.train()
    return torch.zz_of_this_program.train.real
""",
    """z.train += 1""",
)

MORE_LOOKUPS["torch func own"] = read(
    """
F = {'w': 2.0}

def own(x):
    return F['w']
torch.own_of_this_program = own

def weigh(b):
    return torch.own_of_this_program(1)
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["class_getitem"] = read(
    """
F = {'w': 2.0}

class A:

    def __class_getitem__(cls, k):
        return F['w']

def weigh(b):
    return A[1]
""",
    """F['w'] += 1""",
)

MORE_LOOKUPS["copy own"] = read(
    """
import copy

class A:

    def __copy__(s):
        return s.w
a = A()
a.w = 2.0

def weigh(b):
    return copy.copy(a)
""",
    """a.w += 1""",
)

MORE_LOOKUPS["deepcopy own"] = read(
    """
import copy

class A:

    def __deepcopy__(s, m):
        return s.w
a = A()
a.w = 2.0

def weigh(b):
    return copy.deepcopy(a)
""",
    """a.w += 1""",
)

MORE_LOOKUPS["pydantic dump sum"] = read(
    """
import pydantic

class C(pydantic.BaseModel):
    w: float = 2.0
c = C()

def weigh(b):
    return sum(c.model_dump().values())
""",
    """c.w += 1""",
)

MORE_LOOKUPS["module repr"] = read(
    """
class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.w = 2.0

    def extra_repr(s):
        return str(s.w)
m = M()

def weigh(b):
    return float(repr(m)[2:-1])
""",
    """m.w += 1""",
)

MORE_LOOKUPS["returned module"] = read(
    """
import sys, types
m = types.ModuleType('psettings_a')
m.rate = 2.0
sys.modules['psettings_a'] = m

def cfg():
    import psettings_a
    return psettings_a

def weigh(b):
    return cfg().rate
""",
    """m.rate += 1""",
)

MORE_LOOKUPS["module passed"] = read(
    """
import sys, types
m = types.ModuleType('psettings_b')
m.rate = 2.0
sys.modules['psettings_b'] = m

def helper(x):
    return x.rate

def weigh(b):
    return helper(m)
""",
    """m.rate += 1""",
)

MORE_LOOKUPS["module passed imported"] = read(
    """
import sys, types
mm = types.ModuleType('psettings_c')
mm.rate = 2.0
sys.modules['psettings_c'] = mm

def helper(x):
    return x.rate

def weigh(b):
    import psettings_c as q
    return helper(q)
""",
    """mm.rate += 1""",
)

MORE_LOOKUPS["tensor subclass method"] = read(
    """
G = {'w': 2.0}

class MyT(torch.Tensor):

    def weigh(s):
        return G['w']
t = torch.ones(1).as_subclass(MyT)

def weigh(b):
    return t.weigh()
""",
    """G['w'] += 1""",
)

MORE_LOOKUPS["parameter subclass method"] = read(
    """
G = {'w': 2.0}

class MyP(nn.Parameter):

    def weigh(s):
        return G['w']
t = MyP(torch.ones(1))

def weigh(b):
    return t.weigh()
""",
    """G['w'] += 1""",
)

MORE_LOOKUPS["keys data"] = read(
    """
class I:

    def keys(s):
        return s.names

    def __getitem__(s, k):
        return 2.0
i = I()
i.names = ['w']

def weigh(b):
    return float(len(dict(**i)))
""",
    """i.names=i.names+[f'x{len(i.names)}']""",
)
