"""IPPO on JaxMARL's Overcooked, one compiled function per update; measured by `ppo_speed.py`, which starts it.

    python jaxmarl_ippo.py '{"network": "shared", "num_envs": 32, "num_steps": 400, ...}'

Needs jaxmarl and optax. The training loop is written anew after the description of their baseline: independent PPO
with shared weights, both seats in one batch, `env.step` with its automatic reset, shaped rewards fading linearly.
Prints one line of JSON: CPU seconds to compile, environment steps per CPU second of every repeat, and for each of
`train_seeds` the sparse return after `total_steps`, the mean of 100 whole games with sampled actions.
"""

import json
import math
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import optax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jaxmarl
    from jaxmarl.environments.overcooked import overcooked_layouts

ACTIONS, HIDDEN, HORIZON = 6, 64, 400
ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


def make_layers(key, sizes, gains):
    """Orthogonal weights and no biases of a perceptron."""
    keys = jax.random.split(key, len(gains))
    shapes = zip(keys, sizes[:-1], sizes[1:], gains, strict=True)
    return [(jax.nn.initializers.orthogonal(gain)(k, (a, b)), jnp.zeros(b)) for k, a, b, gain in shapes]


def run_layers(layers, hidden, activation):
    """Output of a perceptron that is linear at its end."""
    for weight, bias in layers[:-1]:
        hidden = activation(hidden @ weight + bias)
    return hidden @ layers[-1][0] + layers[-1][1]


def make_network(options, inputs):
    """Returns `init(key)` and `apply(weights, x) -> (logits, value)`.

    "separate": an actor and a critic of two layers of 64, as in their baseline; "shared": both from one trunk.
    """
    activation, root2 = ACTIVATIONS[options["activation"]], 2**0.5

    def init(key):
        actor, critic = jax.random.split(key)
        if options["network"] == "shared":
            return [make_layers(actor, (inputs, HIDDEN, HIDDEN, ACTIONS + 1), (root2, root2, 0.01))]
        sizes = (inputs, HIDDEN, HIDDEN)
        return [
            make_layers(actor, (*sizes, ACTIONS), (root2, root2, 0.01)),
            make_layers(critic, (*sizes, 1), (root2, root2, 1.0)),
        ]

    def apply(weights, x):
        outputs = [run_layers(layers, x, activation) for layers in weights]
        return outputs[0][..., :ACTIONS], outputs[-1][..., -1]

    return init, apply


def both_seats(values):
    """Dictionary of the two players' (N, ...) -> (2N, -1)."""
    stacked = jnp.stack([values["agent_0"], values["agent_1"]])
    return stacked.reshape(2 * stacked.shape[1], -1)


def make_training(options):
    """Returns `start(key)`, the compiled-to-be `update(carry)`, and `games(weights, key)`, the sparse returns."""
    env = jaxmarl.make("overcooked", layout=overcooked_layouts[options["layout"]], max_steps=HORIZON)
    num_envs, num_steps = options["num_envs"], options["num_steps"]
    init, network = make_network(options, math.prod(env.observation_space("agent_0").shape))
    per_update = options["epochs"] * options["minibatches"]
    total = options["total_steps"] / (num_envs * num_steps)
    rate = optax.linear_schedule(options["rate"], 0.0, int(total) * per_update)
    optimiser = optax.chain(optax.clip_by_global_norm(options["max_grad_norm"]), optax.adam(rate, eps=1e-5))

    def choose(weights, seen, key):
        logits, value = network(weights, both_seats(seen).astype(jnp.float32))
        action = jax.random.categorical(key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        return action, log_prob, value

    def play(weights, state, seen, key, count):
        choice, move = jax.random.split(key)
        action, log_prob, value = choose(weights, seen, choice)
        joint = {"agent_0": action[:count], "agent_1": action[count:]}
        step = jax.vmap(env.step)(jax.random.split(move, count), state, joint)
        return action, log_prob, value, step

    def start(key):
        first, second = jax.random.split(key)
        weights = init(first)
        seen, state = jax.vmap(env.reset)(jax.random.split(second, num_envs))
        return weights, optimiser.init(weights), state, seen, key, jnp.zeros(())

    def loss(weights, batch):
        x, action, old_log_prob, old_value, advantage, target = batch
        logits, value = network(weights, x.astype(jnp.float32))
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0] - old_log_prob)
        normal, clip = (advantage - advantage.mean()) / (advantage.std() + 1e-8), options["clip"]
        policy = -jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - clip, 1 + clip) * normal).mean()
        near = old_value + jnp.clip(value - old_value, -clip, clip)
        critic = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy + options["value_coef"] * critic - options["entropy_coef"] * entropy

    def update(carry):
        weights, moments, state, seen, key, done_steps = carry
        key, roll, shuffle = jax.random.split(key, 3)
        shaping = jnp.maximum(0.0, 1 - done_steps / options["shaping_steps"])

        def one(at, key):
            state, seen = at
            action, log_prob, value, step = play(weights, state, seen, key, num_envs)
            after, state, reward, done, info = step
            shaped = both_seats(info["shaped_reward"])[:, 0]
            reward = both_seats(reward)[:, 0] + shaping * shaped
            over = jnp.tile(done["__all__"], 2)
            return (state, after), (both_seats(seen), action, log_prob, value, reward, over)

        (state, seen), rows = jax.lax.scan(one, (state, seen), jax.random.split(roll, num_steps))
        x, action, log_prob, value, reward, over = rows
        _, last = network(weights, both_seats(seen).astype(jnp.float32))

        def back(after, row):
            advantage, next_value = after
            value, reward, over = row
            delta = reward + options["gamma"] * next_value * (1 - over) - value
            advantage = delta + options["gamma"] * options["gae_lambda"] * (1 - over) * advantage
            return (advantage, value), advantage

        _, advantage = jax.lax.scan(back, (jnp.zeros_like(last), last), (value, reward, over), reverse=True, unroll=16)
        size = num_steps * 2 * num_envs
        data = (x, action, log_prob, value, advantage, advantage + value)
        data = [column.reshape(size, *column.shape[2:]) for column in data]

        def epoch(carry, key):
            order = jax.random.permutation(key, size).reshape(options["minibatches"], -1)

            def minibatch(carry, rows):
                weights, moments = carry
                change, moments = optimiser.update(jax.grad(loss)(weights, [c[rows] for c in data]), moments)
                return (optax.apply_updates(weights, change), moments), None

            return jax.lax.scan(minibatch, carry, order)[0], None

        (weights, moments), _ = jax.lax.scan(epoch, (weights, moments), jax.random.split(shuffle, options["epochs"]))
        return weights, moments, state, seen, key, done_steps + num_envs * num_steps

    def games(weights, key, count=100):
        first, second = jax.random.split(key)
        seen, state = jax.vmap(env.reset)(jax.random.split(first, count))

        def one(at, key):
            _, _, _, step = play(weights, *at, key, count)
            return step[:2][::-1], step[2]["agent_0"]

        _, reward = jax.lax.scan(one, (state, seen), jax.random.split(second, HORIZON))
        return reward.sum(0)

    return start, update, games


def main(options):
    """Measures what the options ask for."""
    start, update, games = make_training(options)
    carry = jax.jit(start)(jax.random.PRNGKey(0))
    began = time.process_time()
    compiled = jax.jit(update).lower(carry).compile()
    result = {"compile_seconds": round(time.process_time() - began, 2), "steps_per_cpu_second": [], "training": []}
    per_update = options["num_envs"] * options["num_steps"]
    carry = jax.block_until_ready(compiled(carry))
    for _ in range(options["repeats"]):
        updates = max(1, round(options["repeat_steps"] / per_update))
        began = time.process_time()
        for _ in range(updates):
            carry = compiled(carry)
        jax.block_until_ready(carry)
        result["steps_per_cpu_second"].append(round(updates * per_update / (time.process_time() - began)))
    for seed in range(options["train_seeds"]):
        carry = jax.jit(start)(jax.random.PRNGKey(seed))
        began = time.process_time()
        for _ in range(round(options["total_steps"] / per_update)):
            carry = compiled(carry)
        jax.block_until_ready(carry)
        seconds = time.process_time() - began
        score = jax.jit(games)(carry[0], jax.random.PRNGKey(1000 + seed)).mean()
        result["training"].append(
            {
                "environment_steps": int(carry[-1]),
                "return": round(float(score), 1),
                "cpu_seconds": round(seconds, 1),
            }
        )
    result["versions"] = {"jax": jax.__version__, "jaxmarl": jaxmarl.__version__}
    print(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
