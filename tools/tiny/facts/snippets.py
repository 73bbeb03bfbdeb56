# ruff: noqa
"""Small programs that people ask a code model for. Each begins with a comment: the ways to ask for it."""


# a function that computes the factorial / factorial
def factorial(n: int) -> int:
    """Return n!."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


# a function that computes Fibonacci numbers / fibonacci
def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


# a recursive Fibonacci function / recursive fibonacci
def fib(n: int) -> int:
    """Return the n-th Fibonacci number, recursively."""
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)


# a function that checks whether a number is prime / a prime test
def is_prime(n: int) -> bool:
    """Return whether n is a prime number."""
    if n < 2:
        return False
    for divisor in range(2, int(n**0.5) + 1):
        if n % divisor == 0:
            return False
    return True


# a function that computes the greatest common divisor / gcd / Euclid's algorithm
def gcd(a: int, b: int) -> int:
    """Return the greatest common divisor of a and b."""
    while b:
        a, b = b, a % b
    return a


# a function that lists primes / the sieve of Eratosthenes
def primes_up_to(limit: int) -> list[int]:
    """Return the primes up to a limit."""
    is_prime = [True] * (limit + 1)
    is_prime[0:2] = [False, False]
    for i in range(2, int(limit**0.5) + 1):
        if is_prime[i]:
            for j in range(i * i, limit + 1, i):
                is_prime[j] = False
    return [i for i, prime in enumerate(is_prime) if prime]


# a function that adds two numbers / an add function
def add(a: int, b: int) -> int:
    """Return the sum of a and b."""
    return a + b


# a binary search / a function that searches a sorted list
def binary_search(items: list[int], target: int) -> int:
    """Return the index of target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


# a bubble sort / bubble sort
def bubble_sort(items: list[int]) -> list[int]:
    """Sort a list in place by swapping neighbours."""
    for end in range(len(items) - 1, 0, -1):
        for i in range(end):
            if items[i] > items[i + 1]:
                items[i], items[i + 1] = items[i + 1], items[i]
    return items


# quicksort / a quicksort
def quicksort(items: list[int]) -> list[int]:
    """Return a sorted copy of a list."""
    if len(items) <= 1:
        return items
    pivot, *rest = items
    smaller = [item for item in rest if item < pivot]
    larger = [item for item in rest if item >= pivot]
    return quicksort(smaller) + [pivot] + quicksort(larger)


# merge sort / a merge sort
def merge_sort(items: list[int]) -> list[int]:
    """Return a sorted copy of a list."""
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left, right = merge_sort(items[:middle]), merge_sort(items[middle:])
    merged = []
    while left and right:
        merged.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return merged + left + right


# a function that reverses a string / string reversal
def reverse_string(text: str) -> str:
    """Return the text backwards."""
    return text[::-1]


# a function that checks for a palindrome / a palindrome test
def is_palindrome(text: str) -> bool:
    """Return whether the text reads the same backwards."""
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]


# a function that counts words / a word count
def count_words(text: str) -> dict[str, int]:
    """Return how often each word occurs in the text."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


# a function that counts vowels / a vowel counter
def count_vowels(text: str) -> int:
    """Return the number of vowels in the text."""
    return sum(1 for c in text.lower() if c in "aeiou")


# a function that reads a file / reading a file
def read_file(path: str) -> str:
    """Return the text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


# a function that reads the lines of a file / reading lines
def read_lines(path: str) -> list[str]:
    """Return the lines of a file without their newlines."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


# a function that reads JSON / loading JSON
def read_json(path: str) -> dict:
    """Return the contents of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


# a function that writes JSON / saving JSON
def write_json(path: str, value: dict) -> None:
    """Write a value to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)


# fizzbuzz / FizzBuzz
def fizzbuzz(n: int) -> None:
    """Print the numbers from 1 to n, with Fizz and Buzz."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)


# a function that flattens a list / flattening nested lists
def flatten(items: list) -> list:
    """Return the elements of nested lists as one list."""
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


# a function that splits a list into chunks / chunks of a list
def chunks(items: list, size: int) -> list[list]:
    """Return pieces of at most size elements."""
    return [items[i : i + size] for i in range(0, len(items), size)]


# a function that computes the mean / the average of a list
def mean(values: list[float]) -> float:
    """Return the average of the values."""
    return sum(values) / len(values)


# a function that finds the maximum / the largest element
def maximum(values: list[float]) -> float:
    """Return the largest value."""
    largest = values[0]
    for value in values[1:]:
        if value > largest:
            largest = value
    return largest


# a function that removes duplicates / removing duplicates from a list
def unique(items: list) -> list:
    """Return the items without repetition, in order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


# a stack class / a stack
class Stack:
    """A last-in, first-out container."""

    def __init__(self) -> None:
        self.items = []

    def push(self, item: object) -> None:
        """Put an item on top."""
        self.items.append(item)

    def pop(self) -> object:
        """Remove and return the top item."""
        return self.items.pop()

    def is_empty(self) -> bool:
        """Return whether there are no items."""
        return not self.items


# a queue class / a queue
class Queue:
    """A first-in, first-out container."""

    def __init__(self) -> None:
        self.items = deque()

    def put(self, item: object) -> None:
        """Add an item at the end."""
        self.items.append(item)

    def get(self) -> object:
        """Remove and return the first item."""
        return self.items.popleft()


# a linked list / a linked list class
class Node:
    """An element of a linked list."""

    def __init__(self, value: object, next: object = None) -> None:
        self.value = value
        self.next = next


# a point class / a class for points
class Point:
    """A point in the plane."""

    def __init__(self, x: float, y: float) -> None:
        self.x = x
        self.y = y

    def __repr__(self) -> str:
        return f"Point({self.x}, {self.y})"


# a counter class / a counter
class Counter:
    """Counts up."""

    def __init__(self) -> None:
        self.value = 0

    def increment(self) -> int:
        """Add one and return the new value."""
        self.value += 1
        return self.value


# a bank account class / a class for accounts
class Account:
    """A bank account."""

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def deposit(self, amount: int) -> None:
        """Add an amount."""
        self.balance += amount

    def withdraw(self, amount: int) -> None:
        """Take an amount, which must be there."""
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount


# a program with arguments / a command-line program / a main function
def main() -> None:
    """Read the arguments and print a greeting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--count", type=int, default=1)
    args = parser.parse_args()
    for _ in range(args.count):
        print(f"Hello, {args.name}!")


# a timing decorator / a decorator that measures time
def timed(function: object) -> object:
    """Print how long each call of a function takes."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        print(f"{function.__name__} took {time.perf_counter() - start:.3f} s")
        return result

    return wrapper


# a function that sums a list / summing a list
def total(values: list[float]) -> float:
    """Return the sum of the values."""
    result = 0
    for value in values:
        result += value
    return result


# a function that squares numbers / squares of a list
def squares(values: list[int]) -> list[int]:
    """Return the square of each value."""
    return [value * value for value in values]


# a function that converts Celsius to Fahrenheit / a temperature conversion
def celsius_to_fahrenheit(celsius: float) -> float:
    """Convert a temperature."""
    return celsius * 9 / 5 + 32


# a function that checks for an even number / an even test
def is_even(n: int) -> bool:
    """Return whether n is even."""
    return n % 2 == 0


# a function that greets / a greeting function
def greet(name: str) -> str:
    """Return a greeting."""
    return f"Hello, {name}!"


# a function that downloads a page / downloading a URL
def download(url: str) -> bytes:
    """Return the body of a web page."""
    with urllib.request.urlopen(url) as response:
        return response.read()


# an asynchronous function / an asyncio example
async def work(name: str, delay: float) -> None:
    """Wait, then print a name."""
    await asyncio.sleep(delay)
    print(name)


# a softmax function / softmax in NumPy
def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# a function that generates text with quire / a quire program
def generate(prompts: list[str]) -> list[str]:
    """Return quire's completion of each prompt."""
    llm = LLM()
    params = SamplingParams(temperature=0.7, max_tokens=64)
    return [output.outputs[0].text for output in llm.generate(prompts, params)]
