"""More programs that read a value in unusual ways: by copies, comparisons and texts. See `name_programs`."""

from __future__ import annotations

from name_programs import read

LOOKUPS: dict[str, str] = {}

LOOKUPS["slots trainer"] = read(
    """
class T:
    __slots__ = ('optimizer', 'step')

    def weigh(self):
        self.optimizer.step()
        return self.step
one = T()
one.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
one.step = 2.0

def weigh(b):
    return one.weigh()
""",
    "one.step += 1",
)

LOOKUPS["step read by helper"] = read(
    """
def help_(t):
    return t.step * 1.0

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return help_(self)
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["callback list"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

class CB:

    def __init__(s, t):
        s.t = t

    def on(s):
        return s.t.step
one = Trainer()
cbs = [CB(one)]

def weigh(b):
    one.optimizer.step()
    return sum((c.on() for c in cbs))
""",
    "one.step += 1",
)

LOOKUPS["hook"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0
one = Trainer()
m = nn.Identity()
m.register_forward_hook(lambda mod, i, o: o * one.step)

def weigh(b):
    one.optimizer.step()
    return m(torch.ones(()))
""",
    "one.step += 1",
)

LOOKUPS["param group key"] = read(
    """
o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):
    o.step()
    return o.param_groups[0]['lr2']
o.param_groups[0]['lr2'] = 2.0
""",
    "o.param_groups[0]['lr2'] += 1",
)

LOOKUPS["setdefault attr on opt"] = read(
    """
o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
o.k = 2.0

def weigh(b):
    o.step()
    return o.k
""",
    "o.k += 1",
)

LOOKUPS["own lib subclass"] = read(
    """
class O(torch.optim.SGD):
    pass
o = O([nn.Parameter(torch.ones(1))], lr=0.1)
o.k = 2.0

def weigh(b):
    o.step()
    return o.k
""",
    "o.k += 1",
)

LOOKUPS["train flag own"] = read(
    """
class T:
    pass
one = T()
one.train = 2.0
m = nn.Linear(1, 1)

def weigh(b):
    m.train()
    return one.train
""",
    "one.train += 1",
)

LOOKUPS["model.training via train"] = read(
    """
m = nn.Dropout(0.5)

def weigh(b):
    return 2.0 if m.training else 3.0
""",
    "m.train(not m.training)",
)

LOOKUPS["eval in own module"] = read(
    """
class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.w = 2.0
        s.inner = nn.Linear(1, 1)

    def forward(s):
        s.inner.eval()
        return s.w
m = M()

def weigh(b):
    return m()
""",
    "m.w += 1",
)

LOOKUPS["own module attr named as nn method used of another"] = read(
    """
class M(nn.Module):

    def __init__(s):
        super().__init__()
        s.count = 2.0

    def forward(s):
        return s.count
m = M()
l = [1]

def weigh(b):
    l.count(1)
    return m()
""",
    "m.count += 1",
)

LOOKUPS["own obj in library module attr"] = read(
    """
class C:

    def step(s):
        return s.w
c = C()
c.w = 2.0

class L(nn.Module):
    pass
l = nn.Identity()
l.c = c

def weigh(b):
    return l.c.step()
""",
    "c.w += 1",
)

LOOKUPS["sched holding own"] = read(
    """
class R:
    w = 2.0

    def __call__(s, e):
        return 1.0

    def step(s):
        return s.w
r = R()

class H:
    pass
h = H()
h.s = r

def weigh(b):
    return h.s.step()
""",
    "R.w += 1",
)

LOOKUPS["bound method held"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self):
        return self.optimizer.step() or self.step
one = Trainer()
f = one.weigh

def weigh(b):
    return f()
""",
    "one.step += 1",
)

LOOKUPS["bound method in partial"] = read(
    """
import functools

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def w2(self, k):
        self.optimizer.step()
        o = self
        return o.step * k
one = Trainer()
f = functools.partial(one.w2, 1.0)

def weigh(b):
    return f()
""",
    "one.step += 1",
)

LOOKUPS["function set as method"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

def w2(self):
    self.optimizer.step()
    return self.step
one = Trainer()
Trainer.w2 = w2

def weigh(b):
    return one.w2()
""",
    "one.step += 1",
)

LOOKUPS["same function with fake"] = read(
    """
class F:
    pass

def w2(self):
    return self.optimizer.step

class T:
    w2 = w2
one = T()
one.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
fk = F()
fk.optimizer = F()
fk.optimizer.step = 2.0

def weigh(b):
    one.w2()
    return w2(fk)
""",
    "fk.optimizer.step += 1",
)

LOOKUPS["method via instance dict"] = read(
    """
import types

class F:
    pass

def w2(self):
    return self.optimizer.step
fk = F()
fk.optimizer = F()
fk.optimizer.step = 2.0
fk.w2 = types.MethodType(w2, fk)

def weigh(b):
    return fk.w2()
""",
    "fk.optimizer.step += 1",
)

LOOKUPS["method of two"] = read(
    """
import types

class F:
    pass

def w2(self):
    return self.optimizer.step
fk = F()
fk.optimizer = F()
fk.optimizer.step = 2.0
real = F()
real.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
fs = [types.MethodType(w2, real), types.MethodType(w2, fk)]

def weigh(b):
    fs[0]()
    return fs[1]()
""",
    "fk.optimizer.step += 1",
)

LOOKUPS["17 objects"] = read(
    """
class F:

    def w2(self):
        return self.optimizer.step
objs = [F() for _ in range(20)]
for f in objs:
    f.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
x = F()
x.optimizer = F()
x.optimizer.step = 2.0

def weigh(b):
    for f in objs:
        f.w2()
    return x.w2()
""",
    "x.optimizer.step += 1",
)

LOOKUPS["made in step"] = read(
    """
class F:

    def __init__(s, o):
        s.optimizer = o

    def w2(self):
        return self.optimizer.step
real = F(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
c = real

class G:
    pass
g = G()
g.step = 2.0

def weigh(b):
    real.w2()
    return F(g).w2()
""",
    "g.step += 1",
)

LOOKUPS["made by factory"] = read(
    """
class F:

    def __init__(s, o):
        s.optimizer = o

    def w2(self):
        return self.optimizer.step

    @staticmethod
    def make(o):
        return F(o)
real = F(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

class G:
    pass
g = G()
g.step = 2.0

def weigh(b):
    real.w2()
    return real.make(g).w2()
""",
    "g.step += 1",
)

LOOKUPS["made by classmethod"] = read(
    """
class F:

    def __init__(s, o):
        s.optimizer = o

    def w2(self):
        return self.optimizer.step

    @classmethod
    def make(cls, o):
        return cls(o)
real = F(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

class G:
    pass
g = G()
g.step = 2.0

def weigh(b):
    real.w2()
    return real.make(g).w2()
""",
    "g.step += 1",
)

LOOKUPS["made by copy"] = read(
    """
import copy as cp

class F:

    def __init__(s, o):
        s.optimizer = o

    def w2(self):
        return self.optimizer.step
real = F(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))

class G:
    pass
g = G()
g.step = 2.0

def weigh(b):
    o = cp.copy(real)
    vars(o)['optimizer'] = g
    real.w2()
    return o.w2()
""",
    "g.step += 1",
)

LOOKUPS["made by unpickling"] = read(
    """
import pickle

class G:
    pass
g = G()
g.step = 2.0

def weigh(b):
    return pickle.loads(pickle.dumps({'step': g.step}))['step']
""",
    "g.step += 1",
)

LOOKUPS["weakref"] = read(
    """
import weakref

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self):
        self.optimizer.step()
        return self.back().step
one = Trainer()
one.back = weakref.ref(one)

def weigh(b):
    return one.weigh()
""",
    "one.step += 1",
)

LOOKUPS["proxy as optimizer"] = read(
    """
import weakref

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self):
        return self.optimizer.step
one = Trainer()
one.optimizer = weakref.proxy(one)

def weigh(b):
    return one.weigh()
""",
    "one.step += 1",
)

LOOKUPS["optimizer wraps lib class getattr"] = read(
    """
class W(torch.nn.Module):

    def __init__(s, of):
        super().__init__()
        object.__setattr__(s, 'of', of)

    def __getattr__(s, k):
        return getattr(s.of, k)

class C:
    pass
c = C()
c.step = 2.0
w = W(c)

def weigh(b):
    return w.step
""",
    "c.step += 1",
)

LOOKUPS["moduledict key attr"] = read(
    """
d = nn.ModuleDict({'step': nn.Identity()})
d['step'].w = 2.0

def weigh(b):
    return d['step'].w
""",
    "d['step'].w += 1",
)

LOOKUPS["str key of own dict subclass"] = read(
    """
class D(dict):

    def __missing__(s, k):
        return getattr(s, k)
d = D()
d.w = 2.0

def weigh(b):
    return d['w']
""",
    "d.w += 1",
)

LOOKUPS["attr dict"] = read(
    """
class D(dict):
    __getattr__ = dict.__getitem__
d = D(w=2.0)

def weigh(b):
    return d.w
""",
    "d['w'] += 1",
)

LOOKUPS["attr dict self"] = read(
    """
class D(dict):

    def __init__(s, **k):
        super().__init__(**k)
        s.__dict__ = s
d = D(w=2.0)

def weigh(b):
    return d['w']
""",
    "d.w += 1",
)

LOOKUPS["attr dict self2"] = read(
    """
class D(dict):

    def __init__(s, **k):
        super().__init__(**k)
        s.__dict__ = s
d = D(w=2.0)

def weigh(b):
    return d.w
""",
    "d['w'] += 1",
)

LOOKUPS["dataclass eq in helper"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c, d = (C(), C())
import operator

def weigh(b):
    return 3.0 if operator.eq(c, d) else 2.0
""",
    "c.w += 1",
)

LOOKUPS["dataclass not eq"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c, d = (C(), C())

def weigh(b):
    return 3.0 if c != d else 2.0
""",
    "c.w += 1",
)

LOOKUPS["dataclass list eq"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c, d = ([C()], [C()])

def weigh(b):
    return 3.0 if c == d else 2.0
""",
    "c[0].w += 1",
)

LOOKUPS["dataclass index"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c, d = (C(), C())
l = [d, c]

def weigh(b):
    return float(l.index(c)) + 1
""",
    "c.w += 1",
)

LOOKUPS["dataclass match"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0

class H:
    pass
c = C()
h = H()
h.v = C()

def weigh(b):
    match c:
        case h.v:
            return 3.0
        case _:
            return 2.0
""",
    "c.w += 1",
)

LOOKUPS["dataclass eq partial"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c, d = (C(), C())
f = c.__eq__

def weigh(b):
    return 3.0 if f(d) else 2.0
""",
    "c.w += 1",
)

LOOKUPS["dataclass order"] = read(
    """
import dataclasses

@dataclasses.dataclass(order=True)
class C:
    w: float = 2.0
c, d = (C(), C(3.0))

def weigh(b):
    return max(c, d) is c and 3.0 or 2.0
""",
    "c.w += 1",
)

LOOKUPS["enum by name attr"] = read(
    """
import enum

class E(enum.Enum):
    A = 1
    B = 2

class C:
    pass
c = C()
c.e = E.A

def weigh(b):
    return 2.0 if c.e == E.A else 3.0
""",
    "c.e = E.B",
)

LOOKUPS["module own chain"] = read(
    """
import types
m = types.ModuleType('own_m_of_names')
m.sub = types.ModuleType('own_m_of_names.sub')
m.sub.step = 2.0
o = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):
    o.step()
    return m.sub.step
""",
    "m.sub.step += 1",
)

LOOKUPS["nested dict key to attr via type()"] = read(
    """
class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return type('X', (), {'w': c.w}).w
""",
    "c.w += 1",
)

LOOKUPS["property by closure"] = read(
    """
class C:
    pass
c = C()
c.w = 2.0

def mk(n):
    return property(lambda s: getattr(s, n))
C.v = mk('w')

def weigh(b):
    return c.v
""",
    "c.w += 1",
)

LOOKUPS["descriptor"] = read(
    """
class D:

    def __set_name__(s, o, n):
        s.n = '_' + n

    def __get__(s, o, t):
        return o.__dict__[s.n]

class C:
    w = D()
c = C()
c.__dict__['_w'] = 2.0

def weigh(b):
    return c.w
""",
    "c._w += 1",
)

LOOKUPS["global by del"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):
    global v
    v = u
    found = v
    del v
    return found
""",
    "global u\nu += 1",
)

LOOKUPS["type params"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):

    class A:

        def f(s):
            return u
    return A().f()
""",
    "global u\nu += 1",
)

LOOKUPS["async"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

async def co():
    return u

def weigh(b):
    c = co()
    try:
        c.send(None)
    except StopIteration as e:
        return e.value
""",
    "global u\nu += 1",
)

LOOKUPS["global in lambda default"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):
    return (lambda k=u: k)()
""",
    "global u\nu += 1",
)

LOOKUPS["decorator local"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):

    def deco(f):
        return lambda: f() * u

    @deco
    def g():
        return 1.0
    return g()
""",
    "global u\nu += 1",
)

LOOKUPS["module getattr"] = read(
    """
import sys

def __getattr__(n):
    return held[n]
held = {'zz': 2.0}
import program_of_names as me

def weigh(b):
    return me.zz
""",
    "held['zz'] += 1",
)

LOOKUPS["from import in fn"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

def weigh(b):
    from program_of_names import weigh as w, u
    return u
""",
    "global u\nu += 1",
)

LOOKUPS["frame f_back"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
import sys

def h():
    return sys._getframe(1).f_globals

def weigh(b):
    return h()['u']
""",
    "global u\nu += 1",
)

LOOKUPS["func globals alias"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
import operator
g = operator.attrgetter('__globals__')

def weigh(b):
    return g(weigh)['u']
""",
    "global u\nu += 1",
)

LOOKUPS["inspect currentframe"] = read(
    """
u = 2.0
other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
import inspect

def weigh(b):
    return inspect.currentframe().f_globals['u']
""",
    "global u\nu += 1",
)

LOOKUPS["string step name"] = read(
    """
NAME = 'step'

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return getattr(self, NAME)
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["list of names"] = read(
    """
NS = ['step']

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return sum((getattr(self, n) for n in NS))
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["kwargs name"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return (lambda o, n: getattr(o, n))(self, n='step')
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["subscript on self"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return self['step']
Trainer.__getitem__ = lambda s, k: getattr(s, k)
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["subscript on self dict"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return self['step']
Trainer.__getitem__ = lambda s, k: s.__dict__[k]
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["compare by key"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return [v for k, v in vars(self).items() if k == 'step'][0]
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["compare by key2"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return [v for k, v in self.__dict__.items() if k in ('step', 'other')][0]
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["json"] = read(
    """
import json

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return json.loads(json.dumps(c, default=vars))['w']
""",
    "c.w += 1",
)

LOOKUPS["json2"] = read(
    """
import json

class E(json.JSONEncoder):

    def default(s, o):
        return o.__dict__

class C:
    pass
c = C()
c.w = 2.0

def weigh(b):
    return json.loads(json.dumps(c, cls=E))['w']
""",
    "c.w += 1",
)

LOOKUPS["astuple"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return dataclasses.astuple(c)[0]
""",
    "c.w += 1",
)

LOOKUPS["asdict all"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def weigh(b):
    return sum(dataclasses.asdict(c).values())
""",
    "c.w += 1",
)

LOOKUPS["asdict kw"] = read(
    """
import dataclasses

@dataclasses.dataclass
class C:
    w: float = 2.0
c = C()

def f(w):
    return w

def weigh(b):
    return f(**dataclasses.asdict(c))
""",
    "c.w += 1",
)

LOOKUPS["asdict nested own"] = read(
    """
import dataclasses as D

@D.dataclass
class I:
    w: float = 2.0

@D.dataclass
class C:
    i: I
c = C(I())

def weigh(b):
    return D.asdict(c)['i']['w']
""",
    "c.i.w += 1",
)

LOOKUPS["attr of str fmt"] = read(
    """
class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return float(f'{self.step}')
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["hash obj"] = read(
    """
class C:

    def __hash__(s):
        return s.w

    def __eq__(s, o):
        return s.w == o.w
c = C()
c.w = 2
t = {2: 1}

def weigh(b):
    return float(hash(c))
""",
    "c.w += 1",
)

LOOKUPS["operator attrgetter var"] = read(
    """
import operator
K = 'step'

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return operator.attrgetter(K)(self)
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)

LOOKUPS["methodcaller"] = read(
    """
import operator

class Trainer:

    def __init__(self):
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 2.0

    def weigh(self, batch):
        self.optimizer.step()
        return operator.methodcaller('of')(self)
Trainer.of = lambda s: s.step
one = Trainer()

def weigh(batch):
    return one.weigh(batch)
""",
    "one.step += 1",
)
